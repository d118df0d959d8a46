"""The matcher inside a prefill engine (`engine/own_matcher.py`), on its engine's connection."""

from typing import Any

from kvbus.engine.own_matcher import OwnMatcher
from kvbus.sim.bus import Bus, Station
from kvbus.sim.drive import drive
from kvbus.sim.presence import Feed, Presence, Watcher
from kvbus.sim.world import World
from kvbus_schemas import EngineCard, Message, Post

TICK_S = 0.5
"""Twice as long as the link's, for speed."""


class _OwnBus:
    """`kvbus.bus.Bus`, as far as the matcher uses it."""

    def __init__(self, bus: Bus, station: Station) -> None:
        self._bus, self._station = bus, station

    async def subscribe(self, subject: str, handler: Any) -> None:
        return

    async def post(self, posts: list[Post]) -> None:
        self._bus.publish(self._station, posts)


class SimOwnMatcher:
    """Hears what matchers hear, and every card, also its own engine's."""

    def __init__(self, world: World, bus: Bus, presence: Presence, station: Station) -> None:
        self.world, self.station = world, station
        self.core = OwnMatcher(station.name)
        self._incarnations: dict[str, str] = {}
        self._ticks = False
        drive(self.core.attach(_OwnBus(bus, station)))  # type: ignore[arg-type]  # the part that it uses
        bus.matchers.append((station, self.heard))
        feed = Feed(world, station, self._seen, self._gone)
        presence.watch(Watcher(station, feed.changed))

    def heard(self, message: Message) -> None:
        drive(self.core._hear(message))  # noqa: SLF001  (what it subscribes with)
        self._tick_soon()

    def _seen(self, card: EngineCard) -> None:
        self._incarnations[card.engine_id] = card.incarnation
        drive(self.core.seen(card))
        self._tick_soon()

    def _gone(self, engine_id: str) -> None:
        drive(self.core.gone(engine_id, self._incarnations[engine_id]))

    def _tick_soon(self) -> None:
        if not self._ticks:
            self._ticks = True
            self.world.after(TICK_S, self.station.process, self._tick)

    def _tick(self) -> None:
        self._ticks = False
        drive(self.core.tick())
        core = self.core.core
        if core.contradictions:
            error = core.contradictions.popleft()
            self.world.violate("6", error.transfer_id, f"{self.station.name}'s matcher: {error.text}")
        if core.open_count:
            self._tick_soon()
