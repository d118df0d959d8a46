"""A model of the rules of the stock NIXL push protocol (vLLM 0.32), both halves, after its source.

Registrations travel as NIXL notifications. A producer rank pairs a finished request with a registration by the
request id, and failing that by its base id (what is left without the engine's suffix); blocks are trimmed from the
end; a failed WRITE is told to nobody; finished blocks go when all WRITEs are done or when the lease is over, whatever
is still to be written. A consumer rank counts completion notices; its watchdog only logs. Nothing is ever taken back.

One rule depends on the version. A WRITE that ends after the lease's end has reported its request names a request that
the scheduler no longer knows, upon which EngineCore dies (issues 25562, 43226). 0.32 has a guard on this way into that
assertion, and the assertion itself: half of the runs are without the guard, as the versions before were.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvbus.engine.writing import Write
from kvbus.sim.plane import Fabric, SimPlane
from kvbus.sim.world import Process, World

LEASE_S = 5.0
"""The stock lease of 30 s, scaled down as all durations here are."""
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def base_id(request_id: str) -> str:
    return _SUFFIX.sub("", request_id)


class Registration(NamedTuple):
    """What a decode sends to each prefill rank."""

    request_id: str
    transfer_id: str
    decode: tuple[str, str]
    prefill: tuple[str, str]
    block_ids: tuple[int, ...]


class StockOrders:
    """Step metadata."""

    __slots__ = ("finished", "leases", "preempted", "recving")

    def __init__(self) -> None:
        self.recving: dict[str, Registration] = {}
        self.finished: dict[str, tuple[int, ...]] = {}
        self.leases: dict[str, float] = {}
        self.preempted: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.recving or self.finished or self.leases)


class StockSide:
    """The scheduler half."""

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.orders = StockOrders()

    def hear(self, message: Any) -> None:
        return

    def seen(self, card: Any) -> None:
        return

    def engine_gone(self, engine_id: str) -> None:
        return

    def on_new_request(self, request: Any) -> None:
        return

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        left = len(request.prompt_token_ids) - computed
        return (left, True) if params.get("do_remote_prefill") and left > 0 else (0, False)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        params = request.kv_transfer_params
        if not params.get("do_remote_prefill") or external <= 0:
            return
        params["do_remote_prefill"] = False
        hashed = request.num_cached_tokens // 2  # blocks of two tokens that the prefix cache had
        self.orders.recving[request.request_id] = Registration(
            request.request_id, request.transfer_id, self.key, params["remote_engine"], tuple(block_ids[0][hashed:])
        )

    def build(self, output: Any) -> StockOrders:
        orders, self.orders = self.orders, StockOrders()
        return orders

    def took(
        self,
        finished_recving: set[str] | None,
        finished_sending: set[str] | None,
        failed_recving: set[str] | None = None,
    ) -> None:
        return

    def reply_of(self, request: Any) -> None:
        return

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        if not request.kv_transfer_params.get("do_remote_decode") or request.status.name != "FINISHED_LENGTH_CAPPED":
            return False  # an aborted prefill frees its blocks and tells nobody
        self.orders.finished[request.request_id] = tuple(block_ids[0])
        self.orders.leases[request.request_id] = LEASE_S
        return True


class StockPlane(SimPlane):
    """The completion notice names the decode's request and the producer's size, nothing else."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.decode_ids: dict[str, str] = {}

    def note_of(self, write: Write) -> bytes:
        return f"{self.decode_ids[write.write_id]}:{self.tp_size}".encode()


class StockRank:
    """The worker half, with its writer thread."""

    def __init__(
        self,
        world: World,
        process: Process,
        plane: StockPlane,
        fabric: Fabric,
        tp_size: int,
        news: Callable[[], None],
        *,
        guarded: bool,
    ) -> None:
        self.world, self.process, self.sim_plane, self.fabric = world, process, plane, fabric
        self.tp_size, self.news, self.guarded = tp_size, news, guarded
        self.mail: list[Registration] = []
        self.pending: dict[str, Registration] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.to_send: dict[str, float] = {}
        self.transfers: dict[str, list[list[int]]] = {}
        self.failures: set[str] = set()
        self.recving: dict[str, Registration] = {}
        self.counts: Counter[str] = Counter()
        self._connecting: set[tuple[str, str]] = set()
        self._deferred: list[tuple[str, tuple[int, ...], Registration]] = []
        self._writes = 0

    def heard(self, message: Any) -> None:
        return

    def card_seen(self, card: Any) -> None:
        return

    def card_gone(self, engine_id: str) -> None:
        return

    def step(self, orders: StockOrders, ready: Any) -> None:
        for registration in orders.recving.values():
            self.recving[registration.request_id] = registration
            self._register(registration)
        for request_id, lease_s in orders.leases.items():
            self.to_send[request_id] = self.world.local_s() + lease_s
        for request_id, blocks in orders.finished.items():
            found = self._pop(self.pending, request_id)
            if found is not None:
                self._push(request_id, blocks, found)
            else:
                self.blocks[request_id] = blocks

    def turn(self) -> None:
        """One turn of the writer thread."""
        mail, self.mail = self.mail, []
        for registration in mail:
            found = self._key_of(self.blocks, registration.request_id)
            if found is None:
                self.pending[registration.request_id] = registration
            else:
                self._push(found, self.blocks.pop(found), registration)
        if self.transfers or self.sim_plane.arrived:
            self.news()

    def results(self, orders: StockOrders) -> tuple[set[str], set[str], set[str]]:
        received: set[str] = set()
        for note in self.sim_plane.notes():
            request_id, _, size = note.decode().rpartition(":")
            if request_id not in self.recving:
                continue  # "Unrecognized request notif (may have expired)"
            self.counts[request_id] += 1
            if self.counts[request_id] >= max(1, int(size) // self.tp_size):
                del self.counts[request_id], self.recving[request_id]
                received.add(request_id)
        return self._sent(), received, set()

    def _sent(self) -> set[str]:
        done: set[str] = set()
        for request_id, writes in list(self.transfers.items()):
            states = [self.sim_plane.poll(handles) for handles in writes]
            if "failed" in states:
                self.failures.add(request_id)
            if "pending" not in states:
                del self.transfers[request_id]
                if request_id not in self.failures and (request_id in self.to_send or not self.guarded):
                    done.add(request_id)
                self.failures.discard(request_id)
        now_s = self.world.local_s()
        done |= {request_id for request_id, until_s in self.to_send.items() if now_s >= until_s}
        for request_id in done:
            self.to_send.pop(request_id, None)
            self.blocks.pop(request_id, None)
            self.pending.pop(request_id, None)
        return done

    def _register(self, registration: Registration) -> None:
        end = self.fabric.ends.get(registration.prefill)
        cut = registration.prefill[0] in self.fabric.cut or registration.decode[0] in self.fabric.cut
        if end is None or not end.memory.alive or cut:
            return  # logged; the request waits on
        for rank in end.ranks:
            self.world.after(0.0005 + 0.002 * self.world.rng.random(), None, self._mail, rank, registration)

    def _mail(self, rank: "StockRank", registration: Registration) -> None:
        rank.mail.append(registration)
        self.world.after(0.001, rank.process, rank.turn)

    def _push(self, request_id: str, blocks: tuple[int, ...], registration: Registration) -> None:
        if not self.sim_plane.connected(*registration.decode):
            self._deferred.append((request_id, blocks, registration))
            self._shake_hands(registration.decode)
            return
        target = registration.block_ids
        source = blocks[-len(target) :]
        target = target[-len(source) :]
        self._writes += 1
        write_id = f"w{self._writes}"
        self.sim_plane.decode_ids[write_id] = registration.request_id
        write = Write(write_id, registration.transfer_id, *registration.decode, 0, source, target)
        self.transfers.setdefault(request_id, []).append(self.sim_plane.submit(write, None))

    def _shake_hands(self, key: tuple[str, str]) -> None:
        if key in self._connecting:
            return
        self._connecting.add(key)

        def done(error: str) -> None:
            self._connecting.discard(key)
            waited = [each for each in self._deferred if each[2].decode == key]
            self._deferred = [each for each in self._deferred if each[2].decode != key]
            for each in waited if not error else ():
                self._push(*each)  # whether or not the lease is over by now

        self.sim_plane.connect_to(key, done)

    def _pop(self, table: dict[str, Registration], request_id: str) -> Registration | None:
        key = self._key_of(table, request_id)
        return None if key is None else table.pop(key)

    def _key_of(self, table: dict[str, Any], request_id: str) -> str | None:
        if request_id in table:
            return request_id
        return next((key for key in table if base_id(key) == base_id(request_id)), None)
