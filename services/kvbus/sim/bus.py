"""The bus as the world sees it: messages lost, repeated and late; order kept per sender, subject and receiver only.

What has reached the server is in the stream, whether or not a subscriber got it. A station that is cut off publishes
into its client's buffer, which sometimes goes out when it is back, and hears nothing meanwhile.
"""

from collections.abc import Callable

import msgspec

from kvbus.engine.facts import MATCHER
from kvbus.sim.weather import Weather
from kvbus.sim.world import Process, World
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    Message,
    Post,
    TransferClosed,
)

Hear = Callable[[Message], None]
ALL_HEARD = (BlocksUnavailable, TransferClosed, CancelOrdered)
"""What a matcher hears whoever it is for."""
REGISTERED = (BlocksRegistered, BlocksReady)
KEPT_SHARE = 0.5
"""Share of a cut-off station's messages that goes out when it is back."""


def _deaf(message: Message) -> None:
    return


class Station:
    """One connection: a process, what it is called on the bus, and whether it reaches the server."""

    __slots__ = ("buffer", "cuts", "heals", "hear", "incarnation", "name", "process", "seq")

    def __init__(self, process: Process, name: str, incarnation: str, hear: Hear | None = None) -> None:
        self.process, self.name, self.incarnation = process, name, incarnation
        self.hear: Hear = hear or _deaf
        self.seq = 0
        self.cuts = 0
        """How many faults cut it off now."""
        self.buffer: list[Post] = []
        self.heals: list[Callable[[], None]] = []
        """Called when it is back."""

    @property
    def connected(self) -> bool:
        return not self.cuts


class Bus:
    """All stations. Engines hear what is addressed to them; matchers what `matcher/service.py` subscribes to."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.engines: dict[str, list[Station]] = {}
        self.matchers: list[Station] = []
        self.stream: list[tuple[float, Message]] = []
        self.watch: Callable[[Station, Post], None] | None = None
        """Sees everything that is published, for the rules."""
        self._last: dict[tuple[int, type[Message], str, int], float] = {}

    def publish(self, station: Station, posts: list[Post]) -> None:
        """What a station's process says, in order."""
        for post in posts:
            if self.watch is not None:
                self.watch(station, post)
            if station.cuts:
                if self.world.rng.random() < KEPT_SHARE:
                    station.buffer.append(post)
                continue
            self._send(station, post)

    def cut(self, station: Station) -> None:
        """It no longer reaches the server."""
        station.cuts += 1

    def heal(self, station: Station) -> None:
        """It reaches the server again."""
        station.cuts -= 1
        if station.cuts:
            return
        buffer, station.buffer = station.buffer, []
        for post in buffer:
            self._send(station, post)
        for heal in station.heals:
            heal()

    def _send(self, station: Station, post: Post) -> None:
        world, weather = self.world, self.weather
        rng = world.rng
        station.seq += 1
        message = msgspec.structs.replace(
            post.message, source=station.name, incarnation=station.incarnation, seq=station.seq
        )
        if world.tells:
            world.tell(station.name, message.key, f"says {described(message)} to {post.to}")
        if weather.loss and rng.random() < weather.loss / 2:
            world.tell("bus", message.key, f"loses {type(message).__name__} before the server")
            return
        self.stream.append((world.now, message))
        kind = type(message)
        if post.to in self.engines:
            for receiver in self.engines[post.to]:
                self._deliver(station, receiver, kind, message)
        if kind in ALL_HEARD or (post.to == MATCHER and kind in REGISTERED):
            for receiver in self.matchers:
                self._deliver(station, receiver, kind, message)

    def _deliver(self, station: Station, receiver: Station, kind: type[Message], message: Message) -> None:
        world, weather = self.world, self.weather
        rng = world.rng
        if weather.loss and rng.random() < weather.loss:
            world.tell("bus", message.key, f"loses {kind.__name__} for {receiver.process.name}")
            return
        delay_s = 0.0002 + 0.002 * rng.random()
        if weather.delay and rng.random() < weather.delay:
            delay_s += weather.delay_max_s * rng.random()
        subject = (id(station), kind, message.key, id(receiver))
        at_s = max(world.now + delay_s, self._last.get(subject, 0.0))
        self._last[subject] = at_s
        world.after(at_s - world.now, receiver.process, self._arrive, receiver, message)
        if weather.duplicate and rng.random() < weather.duplicate:
            world.after(at_s - world.now + rng.random() ** 3 * 3.0, receiver.process, self._arrive, receiver, message)

    def _arrive(self, receiver: Station, message: Message) -> None:
        if receiver.cuts:
            return
        if self.world.tells:
            self.world.tell(receiver.process.name, message.key, f"hears {type(message).__name__} of {message.source}")
        receiver.hear(message)


ENVELOPE = frozenset({"source", "incarnation", "seq", "sent_unix_us", "trace_id", "span_id", "transfer_id"})


def described(message: Message) -> str:
    """A message with the fields that are not at their defaults, without its envelope."""
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(message).items()
        if name not in ENVELOPE and value not in ("", 0, 0.0)
    }
    return f"{type(message).__name__}({', '.join(f'{name}={value}' for name, value in fields.items())})"
