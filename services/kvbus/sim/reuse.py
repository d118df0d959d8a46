"""Reuse processes: the production service on a simulated bus, in virtual time.

The service's coroutines are driven by the world. What it has in the bucket outlasts it; what it remembers does not.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kvbus.bus.bucket import Storage
from kvbus.errors import BusError
from kvbus.reuse.past import HEARD_KEY, HEARD_TTL_S
from kvbus.reuse.service import TICK_S, ReuseService
from kvbus.reuse.settings import ReuseSettings
from kvbus.sim.bucket import KvServer, SimBucket
from kvbus.sim.bus import REUSE, Bus, Reply, Station
from kvbus.sim.drive import drive
from kvbus.sim.presence import Presence
from kvbus.sim.world import World
from kvbus_schemas import LoadReported, Message, Post, ReuseAsked, ReuseOffered, ReuseWithdrawn, subjects

KINDS: dict[str, type[Message]] = {
    subjects.of_kind(kind, to=to): kind for kind in (ReuseOffered, ReuseWithdrawn, LoadReported) for to in ("*", REUSE)
}
CONNECT_S = 0.02
LOAD = LoadReported(engine_id="any", running=0, waiting=0, free_blocks=0, total_blocks=0, tokens_in_flight=0)

Handler = Callable[[Any], Awaitable[Any] | None]


class _Counters:
    reconnects = 0


class ServiceBus:
    """`kvbus.bus.Bus` of one process: the part that the reuse service uses."""

    def __init__(self, world: World, bus: Bus, presence: Presence, server: KvServer, station: Station) -> None:
        self.world, self._bus, self._presence = world, bus, presence
        self._server, self._station = server, station
        self.counters = _Counters()
        self.on_connected: list[Callable[[], Awaitable[None]]] = []
        self.shared: dict[type[Message], Handler] = {}
        """What one of all processes gets."""
        self.own: dict[type[Message], Handler] = {}
        """What each of them gets."""
        self.answer: Handler = lambda message: None

    @property
    def connected(self) -> bool:
        return self._station.connected

    async def bucket(
        self, name: str, *, ttl_hint_s: float | None = None, storage: Storage = "memory", replicas: int = 1
    ) -> SimBucket:
        if storage == "memory":
            self._server.in_memory.add(name)
        return SimBucket(self._server, self._presence, self._station, name)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> None:
        (self.shared if queue else self.own)[KINDS[subject]] = handler

    async def respond(self, subject: str, handler: Handler, *, queue: str = "") -> None:
        assert subject == subjects.of_kind(ReuseAsked, to=REUSE)
        self.answer = handler

    async def publish(self, message: Message, to: str) -> None:
        self._bus.publish(self._station, [Post(to, message)])

    async def replay(self, subject: str, *, since_s: float) -> AsyncIterator[tuple[int, float, str, Message]]:
        """Out of the stream; live engines have reported their load within the last 2 s."""
        kind, now_s = KINDS[subject], self.world.now
        if kind is LoadReported:
            if any(entry.present for entry in self._presence.entries.values()):
                yield 0, now_s - 2.0 * self.world.rng.random(), "", LOAD
            return
        for seq, (at_s, message) in enumerate(list(self._bus.stream)):
            if isinstance(message, kind) and now_s - at_s <= since_s:
                yield seq, at_s, "", message


class SimReuse:
    """One reuse process; it begins to listen a moment after its start."""

    def __init__(
        self, world: World, bus: Bus, presence: Presence, server: KvServer, name: str, settings: ReuseSettings
    ) -> None:
        self.world, self.bus, self.server, self.settings = world, bus, server, settings
        self.process = world.process(name, bus.weather.drift)
        self.station = Station(self.process, name, f"{name}-i")
        self.face = ServiceBus(world, bus, presence, server, self.station)
        self.service: ReuseService | None = None
        self._listens_since_s: float | None = None
        self.station.heals.append(self._healed)
        world.after(CONNECT_S, self.process, self._start)

    def crash(self) -> None:
        """kill -9."""
        self.note_listening()
        self.process.alive = False
        if self in self.bus.reuse:
            self.bus.reuse.remove(self)

    def note_listening(self) -> None:
        """It stops listening now: what its ticks have kept in the bucket of leases until now, which cost no event."""
        if self._listens_since_s is None:
            return
        now_s, since_s = self.world.now, self._listens_since_s
        said_s = since_s + (now_s - since_s) // TICK_S * TICK_S
        self.server.write(subjects.LEASES_BUCKET, HEARD_KEY, b"", ttl_s=HEARD_TTL_S, revision=None)
        stored = self.server.buckets[subjects.LEASES_BUCKET][HEARD_KEY]
        self.server.buckets[subjects.LEASES_BUCKET][HEARD_KEY] = stored._replace(until_s=said_s + HEARD_TTL_S)

    # What the bus brings.

    def heard(self, message: Message) -> None:
        """A fact that fell to this process."""
        self._handle(self.face.shared, message)

    def noted(self, message: Message) -> None:
        """A fact that every process gets."""
        self._handle(self.face.own, message)

    def _handle(self, handlers: dict[type[Message], Handler], message: Message) -> None:
        handler = handlers.get(type(message))
        work = handler(message) if handler is not None else None
        if work is not None:
            drive(work, self._logged)  # type: ignore[arg-type]  # a coroutine function's

    def asked(self, message: Message, reply: Reply) -> None:
        work = self.face.answer(message)
        assert work is not None

        def done(answer: Any) -> None:
            if isinstance(answer, Message):
                reply(answer)

        drive(work, done)  # type: ignore[arg-type]  # a coroutine function's

    # Inside.

    def _start(self) -> None:
        self.service = ReuseService(self.face, self.settings)  # type: ignore[arg-type]  # the part that it uses
        drive(self.service.start(), self._started)

    def _started(self, result: Any) -> None:
        if isinstance(result, BusError):
            self.world.after(1.0, self.process, self._start)
            return
        self.bus.reuse.append(self)
        assert self.service is not None
        self._listens_since_s = self.world.now
        drive(self.service.catch_up(), self._logged)

    def _healed(self) -> None:
        self.face.counters.reconnects += 1
        self._listens_since_s = self.world.now
        for work in self.face.on_connected:
            self.world.after(0.01, self.process, self._again, work)

    def _again(self, work: Callable[[], Any]) -> None:
        drive(work(), self._logged)

    def _logged(self, result: Any) -> None:
        if isinstance(result, BusError):
            self.world.tell(self.process.name, "", f"failed: {result}")
