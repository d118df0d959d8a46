"""The data plane: WRITEs that take their time, fail, hang, or land after the process that posted them has died.

A WRITE copies content when it lands, and then its notification arrives. What is assumed of the hardware: a WRITE
lands within WRITE_MAX_S of its submission or never, and one that was aborted does not land afterwards.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kvbus.engine.facts import landing_note, producer_ranks_of
from kvbus.engine.peers import WRITE_MAX_S
from kvbus.engine.writing import Write
from kvbus.sim.memory import Memory, shards_of
from kvbus.sim.weather import Weather
from kvbus.sim.world import Process, World
from kvbus_schemas import EngineCard

HANDSHAKE_MAX_S = 15.0


class End(Protocol):
    """One incarnation of an engine, as the network sees it."""

    memory: Memory
    tp_size: int
    processes: list[Process]
    """Its ranks' processes."""
    ranks: list[Any]

    def note(self, rank: int, note: bytes) -> None:
        """A notification has arrived at a rank."""
        ...


class NicWrite:
    """The part of a WRITE that goes to one rank of its consumer."""

    __slots__ = (
        "captured", "handle", "note", "rank", "shards", "source", "state", "submitted_s", "target", "world", "write",
    )  # fmt: skip

    def __init__(self, world: World, handle: int, write: Write, source: Memory, target: End, rank: int) -> None:
        self.world, self.handle, self.write = world, handle, write
        self.source, self.target, self.rank = source, target, rank
        self.shards: tuple[int, ...] = ()
        self.note = b""
        self.state = "PROC"
        self.submitted_s = world.now
        self.captured: dict[int, list[Any]] | None = None
        """What the source held when its process died."""

    def may_land(self) -> bool:
        """Whether, for all that anybody can know, it can still change its target."""
        return self.state == "PROC" and self.world.now < self.submitted_s + WRITE_MAX_S


class Fabric:
    """All NICs and the network between them."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.ends: dict[tuple[str, str], End] = {}
        self.cut: set[str] = set()
        """Engines whose NICs reach nobody now."""
        self.writes: dict[int, NicWrite] = {}
        self._handles = 0

    def crashed(self, memory: Memory) -> None:
        """An engine has died: what it has posted may still land."""
        memory.alive = False
        for nic in list(self.writes.values()):
            if nic.target.memory is memory or (nic.source is memory and self.world.rng.random() < 0.5):
                self._end(nic, "ERR")
            elif nic.source is memory:
                nic.captured = {b: list(memory.blocks[b].cells) for b in nic.write.source_blocks}

    def post(self, nic: NicWrite, ended: Callable[[], None]) -> None:
        """Put it on the wire. `ended` is called when its initiator can see a new state."""
        self._handles += 1
        nic.handle = self._handles
        self.writes[nic.handle] = nic
        for block_id in nic.write.source_blocks:
            nic.source.blocks[block_id].readers.append(nic)
        for block_id in nic.write.target_blocks:
            nic.target.memory.blocks[block_id].incoming.append(nic)
        rng, weather = self.world.rng, self.weather
        delay_s = 0.0005 + 0.01 * rng.random()
        if weather.write_slow and rng.random() < weather.write_slow:
            delay_s = WRITE_MAX_S * rng.random() ** 2
        cut = nic.write.consumer_id in self.cut or nic.source.name.partition(".")[0] in self.cut
        if cut or rng.random() < weather.write_hang:
            self.world.tell(nic.source.name, nic.write.transfer_id, f"WRITE {nic.write.write_id} hangs")
            return
        if rng.random() < weather.write_fail:
            self.world.after(delay_s, None, self._fail, nic, ended)
        else:
            self.world.after(delay_s, None, self._land, nic, ended, len(nic.write.source_blocks))

    def abort(self, nic: NicWrite) -> None:
        """It will not land any more."""
        if nic.state == "PROC":
            self._end(nic, "ERR")

    def _fail(self, nic: NicWrite, ended: Callable[[], None]) -> None:
        if nic.state != "PROC":
            return
        some = self.world.rng.randrange(len(nic.write.source_blocks) + 1)
        self._copy(nic, some)
        self._end(nic, "ERR")
        ended()

    def _land(self, nic: NicWrite, ended: Callable[[], None], count: int) -> None:
        if nic.state != "PROC":
            return
        self._copy(nic, count)
        self._end(nic, "DONE")
        if nic.target.memory.alive:
            self.world.after(0.0002, None, nic.target.note, nic.rank, nic.note)
        ended()

    def _copy(self, nic: NicWrite, count: int) -> None:
        target = nic.target.memory
        if not target.alive:
            return
        write = nic.write
        if self.world.tells:
            where = f"blocks {write.target_blocks[:count]} of {target.name} shards {nic.shards}"
            text = f"WRITE {write.write_id} lands in {where}"
            self.world.tell(nic.source.name, write.transfer_id, text)
        for source_id, target_id in zip(write.source_blocks[:count], write.target_blocks[:count], strict=True):
            block = target.blocks[target_id]
            owners = block.owners
            held = len(owners) == 1 and owners[0].parked and owners[0].awaits == write.transfer_id
            if not held and target.strict:
                whose = [f"{owner.request_id} ({owner.transfer_id})" for owner in owners] or "nobody"
                text = f"a WRITE of {nic.source.name} landed in block {target_id} of {target.name}, held by {whose}"
                self.world.violate("1", write.transfer_id, text)
                return
            cells = nic.captured[source_id] if nic.captured is not None else nic.source.blocks[source_id].cells
            for shard in nic.shards:
                block.cells[shard] = cells[shard]

    def _end(self, nic: NicWrite, state: str) -> None:
        nic.state = state
        del self.writes[nic.handle]
        for block_id in nic.write.source_blocks:
            nic.source.blocks[block_id].readers.remove(nic)
        for block_id in nic.write.target_blocks:
            nic.target.memory.blocks[block_id].incoming.remove(nic)


class SimPlane:
    """`rank.DataPlane` of one producer rank in the simulated network. `poke`, set later, wakes its thread."""

    def __init__(self, fabric: Fabric, memory: Memory, process: Process, rank: int, tp_size: int) -> None:
        self.fabric, self.memory, self.process = fabric, memory, process
        self.rank, self.tp_size = rank, tp_size
        self.block_bytes = 1
        self.poke: Callable[[], None] = lambda: None
        self.arrived: list[bytes] = []
        self._peers: set[tuple[str, str]] = set()
        self._posted: dict[int, NicWrite] = {}

    def connect(self, card: EngineCard, done: Callable[[str], None]) -> None:
        self.connect_to((card.engine_id, card.incarnation), done)

    def connect_to(self, key: tuple[str, str], done: Callable[[str], None]) -> None:
        """Shake hands with one incarnation of an engine."""
        world, weather = self.fabric.world, self.fabric.weather
        rng = world.rng
        delay_s = 0.005 + 0.02 * rng.random()
        if weather.handshake_slow and rng.random() < weather.handshake_slow:
            delay_s = HANDSHAKE_MAX_S * rng.random() ** 2
        fails = rng.random() < weather.handshake_fail
        world.after(delay_s, self.process, self._met, key, done, fails)

    def _met(self, key: tuple[str, str], done: Callable[[str], None], fails: bool) -> None:
        end = self.fabric.ends.get(key)
        if fails or end is None or not end.memory.alive:
            done("the handshake failed")
        else:
            self._peers.add(key)
            done("")
        self.poke()

    def connected(self, engine_id: str, incarnation: str) -> bool:
        return (engine_id, incarnation) in self._peers

    def disconnect(self, engine_id: str, incarnation: str) -> None:
        self._peers.discard((engine_id, incarnation))

    def submit(self, write: Write, ready: Any) -> list[int]:
        fabric = self.fabric
        world = fabric.world
        target = fabric.ends[(write.consumer_id, write.consumer_incarnation)]
        for block_id in write.source_blocks:
            if self.memory.strict and not self.memory.lends_to(block_id, write.transfer_id):
                text = f"{self.memory.name} submits a WRITE from block {block_id}, which is not this transfer's"
                world.violate("1 source", write.transfer_id, text)
                return []
        handles = []
        mine = shards_of(self.rank, self.tp_size)
        for rank in range(target.tp_size):
            if self.rank not in producer_ranks_of(rank, target.tp_size, self.tp_size):
                continue
            nic = NicWrite(world, 0, write, self.memory, target, rank)
            theirs = shards_of(rank, target.tp_size)
            nic.shards = tuple(shard for shard in mine if shard in theirs)
            nic.note = self.note_of(write)
            if not target.memory.alive:
                nic.state = "ERR"
                handles.append(-1)
                continue
            fabric.post(nic, self._ended)
            self._posted[nic.handle] = nic
            handles.append(nic.handle)
        if world.tells:
            what = f"posts WRITE {write.write_id} of blocks {write.source_blocks} at position {write.first}"
            world.tell(self.process.name, write.transfer_id, what)
        world.after(WRITE_MAX_S * 1.02 + 0.01, self.process, self.poke)
        return handles

    def note_of(self, write: Write) -> bytes:
        """The notification that rides on the WRITE; vLLM's data plane appends the producer's size."""
        note = landing_note(write.transfer_id, self.rank, write.first, len(write.source_blocks))
        return f"{note}:{self.tp_size}".encode()

    def _ended(self) -> None:
        self.fabric.world.after(0.0003, self.process, self.poke)

    def poll(self, handles: list[int]) -> str:
        failed = False
        for handle in list(handles):
            nic = self._posted.get(handle)
            if nic is not None and nic.state == "PROC":
                continue
            failed |= nic is None or nic.state != "DONE"
            handles.remove(handle)
            self._posted.pop(handle, None)
        if failed:
            return "failed" if self.abort(handles) else "pending"
        return "pending" if handles else "done"

    def abort(self, handles: list[int]) -> bool:
        for handle in list(handles):
            nic = self._posted.pop(handle, None)
            if nic is not None:
                self.fabric.abort(nic)
            handles.remove(handle)
        return True

    def notes(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived
