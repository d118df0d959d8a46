"""JetStream KV as the world sees it: one server, and what each process is told of its answers.

A write that is refused, or whose answer is lost, is an error at its process; in the second case it has been done all
the same. Keys have lifetimes in whole seconds, as `bus/bucket.py` gives them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvbus.bus import KeyExistsError, RevisionError
from kvbus.bus.bucket import Entry
from kvbus.bus.errors import RequestTimeoutError
from kvbus.bus.jetstream import whole_seconds
from kvbus.errors import BusError
from kvbus.sim.bus import Station
from kvbus.sim.drive import Resume, Wait
from kvbus.sim.presence import Presence, Watcher
from kvbus.sim.weather import Weather
from kvbus.sim.world import World
from kvbus_schemas import EngineCard, encode

TIMEOUT_S = 2.0
Handler = Callable[[str, bytes | None], None]


class Stored(NamedTuple):
    value: bytes
    revision: int
    until_s: float


class KvServer:
    """All buckets. Those in memory are empty after a restart of the server."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.in_memory: set[str] = set()
        self.starts = 0
        self._revisions = 0

    def restarted(self) -> None:
        self.starts += 1
        for name in self.in_memory:
            self.buckets[name] = {}

    def find(self, bucket: str, key: str) -> Stored | None:
        stored = self.buckets[bucket].get(key)
        return stored if stored is not None and stored.until_s > self.world.now else None

    def write(self, bucket: str, key: str, value: bytes, *, ttl_s: float, revision: int | None) -> int | BusError:
        """`revision`: 0 for a key that must not be there, None for any."""
        stored = self.find(bucket, key)
        if revision == 0 and stored is not None:
            return KeyExistsError(bucket, key)
        if revision and (stored is None or stored.revision != revision):
            return RevisionError(bucket, key, revision)
        self._revisions += 1
        self.buckets[bucket][key] = Stored(value, self._revisions, self.world.now + whole_seconds(ttl_s))
        return self._revisions

    def delete(self, bucket: str, key: str, revision: int | None) -> BusError | None:
        stored = self.find(bucket, key)
        if revision is not None and (stored is None or stored.revision != revision):
            return RevisionError(bucket, key, revision)
        self.buckets[bucket].pop(key, None)
        return None


class SimBucket:
    """`kvbus.bus.Bucket` of one process."""

    def __init__(self, server: KvServer, presence: Presence, station: Station, name: str) -> None:
        self._server, self._presence, self._station, self.name = server, presence, station, name
        server.buckets.setdefault(name, {})

    async def get(self, key: str) -> Entry | None:
        stored = await self._ask(lambda: self._server.find(self.name, key))
        if stored is None:
            return None
        left_s = stored.until_s - self._server.world.now
        return Entry(key, stored.value, stored.revision, left_s) if left_s > 0 else None

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> int:
        return int(await self._ask(lambda: self._server.write(self.name, key, value, ttl_s=ttl_s, revision=0)))

    async def put(self, key: str, value: bytes, *, ttl_s: float) -> int:
        return int(await self._ask(lambda: self._server.write(self.name, key, value, ttl_s=ttl_s, revision=None)))

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float) -> int:
        return int(await self._ask(lambda: self._server.write(self.name, key, value, ttl_s=ttl_s, revision=revision)))

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        await self._ask(lambda: self._server.delete(self.name, key, revision))

    async def watch(self, handler: Handler, prefix: str = ">") -> None:
        """Only the bucket of cards is watched."""

        def changed(engine_id: str, card: EngineCard | None) -> None:
            handler(engine_id, None if card is None else encode(card))

        self._presence.watch(Watcher(self._station, changed))

    def _ask(self, work: Callable[[], Any]) -> Wait:
        return Wait(lambda resume: self._begin(work, resume))

    def _begin(self, work: Callable[[], Any], resume: Resume) -> None:
        world, weather, station = self._server.world, self._server.weather, self._station
        rng, sent_to = world.rng, self._server.starts

        def answer(result: Any) -> None:
            resume(result if station.connected else RequestTimeoutError("the connection broke before the answer"))

        def serve() -> None:
            if not (station.connected and self._presence.up) or sent_to != self._server.starts:
                lose()  # what was on its way has ended with its connection
                return
            result = work()
            if weather.loss and rng.random() < weather.loss / 2:
                lose()
            else:
                world.after(0.0002 + 0.001 * rng.random(), station.process, answer, result)

        def lose() -> None:
            error = RequestTimeoutError(f"no answer within {TIMEOUT_S} s")
            world.after(TIMEOUT_S, station.process, resume, error)

        if not station.connected or (weather.loss and rng.random() < weather.loss / 2):
            lose()
        else:
            delay_s = 0.0002 + 0.001 * rng.random()
            if weather.delay and rng.random() < weather.delay:
                delay_s += min(weather.delay_max_s, TIMEOUT_S) * rng.random()
            world.after(delay_s, None, serve)
