"""The bus as the world sees it: messages lost, repeated and late; order kept per sender, subject and receiver only.

What has reached the server is in the stream, whether or not a subscriber got it. A station that is cut off publishes
into its client's buffer, which sometimes goes out when it is back, and hears nothing meanwhile.
"""

from collections.abc import Callable
from typing import Protocol

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
Reply = Callable[[Message], None]
ALL_HEARD = (BlocksUnavailable, TransferClosed, CancelOrdered)
"""What a matcher hears whoever it is for."""
REGISTERED = (BlocksRegistered, BlocksReady)
REUSE = "reuse"
"""Whom engines tell of offers, and routers ask: one of several processes."""
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


class Member(Protocol):
    """One of the reuse processes, which share their work."""

    station: Station

    def heard(self, message: Message) -> None: ...

    def noted(self, message: Message) -> None:
        """Every one of them gets this."""
        ...

    def asked(self, message: Message, reply: Reply) -> None: ...


class Bus:
    """All stations. Engines hear what is addressed to them; matchers what `matcher/service.py` subscribes to."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.engines: dict[str, list[Station]] = {}
        self.matchers: list[tuple[Station, Hear]] = []
        self.reuse: list[Member] = []
        self.stream: list[tuple[float, Message]] = []
        self.watch: Callable[[Station, Post], None] | None = None
        """Sees everything that is published, for the rules."""
        self.epoch = 0
        """Restarts of the server: what was in it when it died reaches nobody."""
        self._last: dict[tuple[Station, type[Message], str, Station], float] = {}

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
                self._deliver(station, receiver, receiver.hear, kind, message)
        if kind in ALL_HEARD or (post.to == MATCHER and kind in REGISTERED):
            for receiver, hear in self.matchers:
                self._deliver(station, receiver, hear, kind, message)
        if post.to == REUSE:
            self._share(station, kind, message)

    def members(self) -> list[Member]:
        """Those who can be reached now."""
        return [member for member in self.reuse if member.station.connected]

    def _share(self, station: Station, kind: type[Message], message: Message) -> None:
        """One of the reuse processes works on it; all take note of it."""
        members = self.members()
        for member in members:
            self._deliver(station, member.station, member.noted, kind, message)
        if members:
            member = self.world.rng.choice(members)
            self._deliver(station, member.station, member.heard, kind, message)

    def delay_s(self) -> float:
        """How long a message takes."""
        rng, weather = self.world.rng, self.weather
        delay_s = 0.0002 + 0.002 * rng.random()
        if weather.delay and rng.random() < weather.delay:
            delay_s += weather.delay_max_s * rng.random()
        return delay_s

    def _deliver(self, station: Station, receiver: Station, hear: Hear, kind: type[Message], message: Message) -> None:
        world, weather = self.world, self.weather
        rng = world.rng
        if weather.loss and rng.random() < weather.loss:
            world.tell("bus", message.key, f"loses {kind.__name__} for {receiver.process.name}")
            return
        delay_s = self.delay_s()
        subject = (station, kind, message.key, receiver)
        at_s = max(world.now + delay_s, self._last.get(subject, 0.0))
        self._last[subject] = at_s
        world.after(at_s - world.now, receiver.process, self._arrive, receiver, hear, message, self.epoch)
        if weather.duplicate and rng.random() < weather.duplicate:
            at_s += rng.random() ** 3 * 3.0
            world.after(at_s - world.now, receiver.process, self._arrive, receiver, hear, message, self.epoch)

    def _arrive(self, receiver: Station, hear: Hear, message: Message, epoch: int) -> None:
        if receiver.cuts or epoch != self.epoch:
            return
        if self.world.tells:
            self.world.tell(receiver.process.name, message.key, f"hears {type(message).__name__} of {message.source}")
        hear(message)


ENVELOPE = frozenset({"source", "incarnation", "seq", "sent_unix_us", "trace_id", "span_id", "transfer_id"})


def described(message: Message) -> str:
    """A message with the fields that are not at their defaults, without its envelope."""
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(message).items()
        if name not in ENVELOPE and value not in ("", 0, 0.0)
    }
    return f"{type(message).__name__}({', '.join(f'{name}={value}' for name, value in fields.items())})"
