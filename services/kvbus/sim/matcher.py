"""Matcher processes: the production core, with what `matcher/service.py` does around it, in virtual time.

One holds the lease and publishes; a standby hears everything and takes over. After a start or a reconnect a matcher
replays the stream. The rules for the lease are those of `matcher/lease.py`.
"""

from collections import deque

from kvbus.matcher.core import MatcherCore
from kvbus.matcher.lease import FENCE_S, RENEW_S, TAKE_OVER_S
from kvbus.matcher.service import OWN_MATCHER
from kvbus.presence import Cards
from kvbus.sim.bus import Bus, Station
from kvbus.sim.presence import Presence, Watcher
from kvbus.sim.world import World
from kvbus_schemas import BlocksUnavailable, EngineCard, Message, Post, PushOrdered

TICK_S = 0.5
"""Half as often as the service, for speed."""
LEASE_MAX_S = 120.0
UNSENT_MAX = 10_000
UNSENT_MAX_AGE_S = 60.0
TRANSFERS_MAX = 64


class Election:
    """The lease in the bucket: its holder, and when it was renewed last."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.holder: SimMatcher | None = None
        self.renewed_s = -TAKE_OVER_S
        self.candidates: list[SimMatcher] = []

    def check(self) -> None:
        """A candidate may have come, gone, stopped or started."""
        holder = self.holder
        if holder is not None and holder.works:
            return
        if holder is not None and not holder.frozen:
            holder.frozen = True
            self.renewed_s = self.world.now - RENEW_S * self.world.rng.random()
            holder.held_until_s = self.renewed_s + FENCE_S
        wait_s = max(self.renewed_s + TAKE_OVER_S - self.world.now, 0.0) + 0.2 * self.world.rng.random()
        self.world.after(wait_s, None, self._take_over, holder)

    def _take_over(self, before: "SimMatcher | None") -> None:
        if self.holder is not before or (before is not None and before.works and not before.frozen):
            return
        for candidate in self.candidates:
            if candidate.works and candidate.caught_up:
                self.holder = candidate
                candidate.frozen = False
                candidate.held_until_s = float("inf")
                self.world.after(0.001, candidate.process, candidate.tick)
                return
        self.world.after(0.5, None, self._again)

    def _again(self) -> None:
        if any(candidate.process.alive for candidate in self.candidates):
            self.check()

    def resumed(self, candidate: "SimMatcher") -> None:
        """A candidate works again. The holder renews if nobody has taken over."""
        if self.holder is candidate and candidate.frozen:
            candidate.frozen = False
            candidate.held_until_s = float("inf")
            return
        self.check()


class SimMatcher:
    """One matcher process."""

    def __init__(self, world: World, bus: Bus, presence: Presence, election: Election, name: str) -> None:
        self.world, self.bus, self.election = world, bus, election
        self.process = world.process(name, bus.weather.drift)
        self.station = Station(self.process, name, f"{name}-i", self.heard)
        self.core = MatcherCore(transfers_max=TRANSFERS_MAX)
        self.cards = Cards()
        self.caught_up = False
        self.publishing = False
        self.frozen = False
        self.held_until_s = float("-inf")
        self.unsent: deque[tuple[float, Post]] = deque(maxlen=UNSENT_MAX)
        self._self_matching: set[str] = set()
        self._seq = 0
        self._ticks = False
        bus.matchers.append((self.station, self.heard))
        election.candidates.append(self)
        presence.watch(Watcher(self.station, self._card_changed))
        self.station.heals.append(self._healed)
        world.after(0.05, self.process, self._catch_up)

    @property
    def works(self) -> bool:
        """It renews the lease, if it holds it."""
        return self.process.alive and not self.process.paused and self.station.connected

    def is_active(self) -> bool:
        return (
            self.caught_up
            and self.station.connected
            and self.election.holder is self
            and self.world.now < self.held_until_s
        )

    def heard(self, message: Message) -> None:
        """As `_on_message`."""
        if self._concerns(message):
            self._give(self.core.receive(message, self.world.local_s()))
        self._tick_soon()

    def tick(self) -> None:
        """As `MatcherService.tick`; it goes on while something is open."""
        now_s = self.world.local_s()
        for engine_id, incarnation in self.cards.gone(now_s):
            self._give(self.core.engine_gone(engine_id, incarnation, now_s))
        self._give(self.core.tick(now_s))
        if self.core.contradictions:
            error = self.core.contradictions.popleft()
            self.world.violate("6", error.transfer_id, f"the matcher sees a contradiction: {error.text}")
        if self.is_active() != self.publishing:
            self._change_over()

    def crash(self) -> None:
        self.process.alive = False
        self.bus.matchers.remove((self.station, self.heard))
        self.election.candidates.remove(self)
        self.election.check()

    # Inside.

    def _tick_soon(self) -> None:
        if not self._ticks:
            self._ticks = True
            self.world.after(TICK_S, self.process, self._tick_on)

    def _tick_on(self) -> None:
        self._ticks = False
        self.tick()
        if self.core.open_count or self.cards._vanished:  # noqa: SLF001  (an idle tick changes nothing)
            self._tick_soon()

    def _concerns(self, message: Message) -> bool:
        if isinstance(message, BlocksUnavailable) and message.source != message.producer_id:
            return False
        return getattr(message, "producer_id", "") not in self._self_matching

    def _card_changed(self, engine_id: str, card: EngineCard | None) -> None:
        now_s = self.world.local_s()
        if card is not None:
            self.cards.seen(card)
            if OWN_MATCHER in card.capabilities:
                self._self_matching.add(engine_id)
            self._give(self.core.engine_seen(card, now_s))
        else:
            self.cards.vanished(engine_id, now_s)
        self._tick_soon()

    def _healed(self) -> None:
        self.world.after(0.01, self.process, self._reconnected)

    def _reconnected(self) -> None:
        self.publishing = False
        self.cards.reconnected(self.world.local_s())
        self._catch_up()
        self.election.resumed(self)

    def _catch_up(self) -> None:
        """As `_catch_up`, out of the stream."""
        self.caught_up = False
        now_s = self.world.now
        stream = self.bus.stream
        for at_s, message in stream[self._seq :]:
            if now_s - at_s <= LEASE_MAX_S and self._concerns(message):
                self._give(self.core.receive(message, self.world.local_s(), now_s - at_s))
        self._seq = len(stream)
        self.caught_up = True
        self.election.check()
        self._tick_soon()

    def _change_over(self) -> None:
        self.publishing = self.is_active()
        if not self.publishing:
            return
        self.world.tell(self.process.name, "", "is the active matcher now")
        now_s = self.world.local_s()
        held_back = [*self.unsent]
        self.unsent.clear()
        fresh = [
            post
            for at_s, post in held_back
            if at_s > now_s - UNSENT_MAX_AGE_S and not isinstance(post.message, PushOrdered)
        ]
        self._give([post for post in fresh if self.core.is_wanted(post)])
        self._give(self.core.standing_orders(now_s))

    def _give(self, posts: list[Post]) -> None:
        for post in posts:
            if self.publishing and self.is_active():
                self.bus.publish(self.station, [post])
            else:
                self.unsent.append((self.world.local_s(), post))
