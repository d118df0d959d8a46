"""Cards in the bucket: put every 2 s, gone 6 s after the last put. Renewals that change nothing cost no event.

While a scheduler's process runs and reaches the server, its puts follow a rhythm and are only computed when somebody
asks; a fault stops the rhythm and starts the expiry.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvbus.engine.own_card import LAPSE_S
from kvbus.engine.peers import PRESENCE_LEASE_S, PRESENCE_RENEW_S
from kvbus.presence import Cards
from kvbus.sim.bus import Station
from kvbus.sim.weather import Weather
from kvbus.sim.world import World
from kvbus_schemas import EngineCard

CardChanged = Callable[[str, EngineCard | None], None]
KEEP_TIME_S = 0.25
WATCH_STEP_S = 1e-6
"""Between two events of one watch, whose order must not hang on the rounding of a sum."""
EXPIRY_LATE_S = 0.3
"""The server looks for expired keys now and then."""


@dataclass(slots=True)
class Entry:
    """One engine_id in the bucket."""

    card: EngineCard
    station: Station
    put_s: float = 0.0
    rhythm_s: float | None = None
    """When the puts of the running rhythm began; None: nobody puts."""
    present: bool = False
    turn: int = 0
    lease: int = 1
    was_put: bool = False


@dataclass(slots=True)
class Watcher:
    """Somebody who watches the bucket; it heals with a snapshot after a cut."""

    station: Station
    changed: CardChanged = lambda engine_id, card: None
    own_id: str = ""
    echo_s: float = 0.001
    own_seen_s: float = -1e9
    """When the newest of its own engine's cards that it has seen was put."""
    own_lease: int = 0
    last_s: float = 0.0
    known: set[str] = field(default_factory=set)


class Feed:
    """What a link makes of the watch (`engine/link.py`): after a reconnect, a missing card is not believed at once."""

    def __init__(
        self, world: World, station: Station, seen: Callable[[EngineCard], None], gone: Callable[[str], None]
    ) -> None:
        self._world, self._process = world, station.process
        self._seen, self._gone = seen, gone
        self._cards = Cards()
        station.heals.append(self._healed)

    def changed(self, engine_id: str, card: EngineCard | None) -> None:
        """In the process of the link."""
        now_s = self._world.local_s()
        if card is not None:
            self._cards.seen(card)
            self._seen(card)
            return
        self._cards.vanished(engine_id, now_s)
        self._keep_time()

    def _healed(self) -> None:
        self._world.after(0.0005, self._process, self._reconnected)

    def _reconnected(self) -> None:
        self._cards.reconnected(self._world.local_s())

    def _keep_time(self) -> None:
        for engine_id, _ in self._cards.gone(self._world.local_s()):
            self._gone(engine_id)
        if self._cards._vanished:  # noqa: SLF001  (with none, another look would change nothing)
            self._world.after(KEEP_TIME_S, self._process, self._keep_time)


class Presence:
    """The bucket `kvbus_engines`."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.entries: dict[str, Entry] = {}
        self.watchers: list[Watcher] = []
        self.up = True

    def announce(self, card: EngineCard, station: Station) -> None:
        """An engine has started and keeps its card from now on."""
        self.entries[card.engine_id] = entry = Entry(card, station)
        station.heals.append(lambda: self.refresh(card.engine_id))
        self._begin(entry)

    def watch(self, watcher: Watcher) -> None:
        """Tell a process about every card; it learns of those that are there at once."""
        watcher.echo_s = 0.001 + 0.02 * self.world.rng.random()
        self.watchers.append(watcher)
        watcher.station.heals.append(lambda: self._snapshot(watcher))
        self._snapshot(watcher)

    def refresh(self, engine_id: str) -> None:
        """The keeper of a card may have stopped or started: look."""
        entry = self.entries.get(engine_id)
        if entry is None:
            return
        process = entry.station.process
        keeps = process.alive and not process.paused and entry.station.connected and self.up
        if keeps and entry.rhythm_s is None:
            self._begin(entry)
        elif not keeps and entry.rhythm_s is not None:
            self._freeze(entry)

    def forget_all(self) -> None:
        """The server has restarted: its memory is empty."""
        for entry in self.entries.values():
            self._freeze(entry)
            entry.turn += 1
            entry.present = False

    def put_s(self, entry: Entry) -> float:
        """When the card was put last."""
        if entry.rhythm_s is None or self.world.now < entry.rhythm_s:
            return entry.put_s
        return entry.rhythm_s + (self.world.now - entry.rhythm_s) // PRESENCE_RENEW_S * PRESENCE_RENEW_S

    # What a process knows of its own engine's card.

    def own_seen_s(self, watcher: Watcher) -> float:
        """World time at which this process saw its own engine's card last."""
        entry = self.entries[watcher.own_id]
        process = watcher.station.process
        if entry.rhythm_s is not None and not process.paused and watcher.station.connected and self.up:
            put_s = self.put_s(entry)
            if put_s + watcher.echo_s > self.world.now:
                put_s -= PRESENCE_RENEW_S
            if put_s >= entry.rhythm_s:
                self._see_own(watcher, entry, put_s)
        return watcher.own_seen_s

    def freeze_own(self, station: Station) -> None:
        """The process is about to stop or to lose the bus: from now on it sees nothing."""
        for watcher in self.watchers:
            if watcher.station is station and watcher.own_id:
                self.own_seen_s(watcher)

    def forget_dead(self) -> None:
        """Processes that have died watch no more."""
        self.watchers = [watcher for watcher in self.watchers if watcher.station.process.alive]

    def resumed(self, watcher: Watcher) -> None:
        """What lay in the socket while the process was paused is read now."""
        entry = self.entries.get(watcher.own_id)
        if entry is not None and watcher.station.connected:
            put_s = self.put_s(entry)
            if put_s + watcher.echo_s > watcher.station.process.paused_at_s:
                self._see_own(watcher, entry, put_s)

    def _see_own(self, watcher: Watcher, entry: Entry, put_s: float) -> None:
        watcher.own_seen_s = max(watcher.own_seen_s, put_s)
        watcher.own_lease = entry.lease

    # Inside.

    def _begin(self, entry: Entry) -> None:
        entry.turn += 1
        entry.rhythm_s = self.world.now + 0.3 * self.world.rng.random()
        self.world.after(entry.rhythm_s - self.world.now, None, self._put, entry, entry.turn)

    def _put(self, entry: Entry, turn: int) -> None:
        if turn != entry.turn or entry.rhythm_s is None:
            return
        was_there, entry.present = entry.present, True
        if not was_there:
            if entry.was_put and self.world.now - entry.put_s > LAPSE_S:
                entry.lease += 1
            entry.was_put = True
            entry.card = msgspec.structs.replace(entry.card, lease=entry.lease)
            self._tell_all(entry.card.engine_id, entry.card)

    def _freeze(self, entry: Entry) -> None:
        for watcher in self.watchers:
            if watcher.own_id == entry.card.engine_id:
                self.own_seen_s(watcher)
        entry.put_s, entry.rhythm_s = self.put_s(entry), None
        entry.turn += 1
        late_s = EXPIRY_LATE_S * self.world.rng.random()
        left_s = max(entry.put_s + PRESENCE_LEASE_S - self.world.now, 0.0)
        self.world.after(left_s + late_s, None, self._expire, entry, entry.turn)

    def _expire(self, entry: Entry, turn: int) -> None:
        if turn != entry.turn or not entry.present:
            return
        entry.present = False
        if self.entries[entry.card.engine_id] is entry:
            self.world.tell("bus", "", f"the card of {entry.card.engine_id} has expired")
            self._tell_all(entry.card.engine_id, None)

    def _tell_all(self, engine_id: str, card: EngineCard | None) -> None:
        for watcher in self.watchers:
            self._tell(watcher, engine_id, card)

    def _tell(self, watcher: Watcher, engine_id: str, card: EngineCard | None) -> None:
        if engine_id == watcher.own_id or not watcher.station.connected or not self.up:
            return
        if card is None and engine_id not in watcher.known:
            return
        (watcher.known.discard if card is None else watcher.known.add)(engine_id)
        rng, weather = self.world.rng, self.weather
        delay_s = 0.001 + 0.01 * rng.random()
        if weather.delay and rng.random() < weather.delay:
            delay_s += weather.delay_max_s * rng.random()
        at_s = watcher.last_s = max(self.world.now + delay_s, watcher.last_s + WATCH_STEP_S)
        self.world.after(at_s - self.world.now, watcher.station.process, watcher.changed, engine_id, card)

    def _snapshot(self, watcher: Watcher) -> None:
        """A watch that (re)starts: what is there, and what is not there any more."""
        for engine_id, entry in self.entries.items():
            if engine_id == watcher.own_id:
                if entry.present:
                    self._see_own(watcher, entry, self.put_s(entry))
            else:
                self._tell(watcher, engine_id, entry.card if entry.present else None)
