"""An engine in a world with conversations: it keeps and serves them, also while it has no request."""

from collections import Counter
from typing import Any

from kvbus.sim.engine import SimEngine
from kvbus.sim.loop import Loop
from kvbus.sim.own_matcher import SimOwnMatcher
from kvbus.sim.pool import Pool
from kvbus.sim.rank import SimLink
from kvbus.sim.request import Request, Status
from kvbus_schemas import Message, PushOrdered

UNREAD_MAX_S = 1.0
CLOCK_STEP_S = 1e-6
KEEP_TIME_S = 0.25


class View:
    """vLLM's scheduler, as far as the connector looks at it."""

    max_num_running_reqs = Loop.max_num_running_reqs

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self._loop.waiting if request.status is not Status.WAITING_FOR_REMOTE_KVS]

    @property
    def running(self) -> list[Request]:
        return self._loop.running


class TalkEngine(SimEngine):
    """A prefill may have its matcher inside."""

    own_matcher: SimOwnMatcher | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        self._quiet: Counter[str] = Counter()
        self._keeps_time = False
        self._ordered_s: dict[str, float] = {}
        """World time at which a transfer's order came in last."""
        super().__init__(*args, **named)
        ground, me = self.ground, self.identity
        self.view = View(self.loop)
        if ground.settings.matcher == "engine" and me.role == "prefill":
            self.own_matcher = SimOwnMatcher(self.world, ground.bus, ground.presence, self.station)

    def crash(self) -> None:
        super().crash()
        if self.own_matcher is not None:
            self.ground.bus.matchers.remove((self.station, self.own_matcher.heard))

    def _make_side(self, link: SimLink) -> Any:
        side = super()._make_side(link)
        Pool(self.memory, side.reuse)
        return side

    def _has_work(self) -> bool:
        """A wake-up brings steps, as long as the connector has news; so does every step."""
        self.woken = bool(self.loop.requests) or (self.woken and self.side.has_news())
        return self.woken

    def _take_news(self, rank: Any) -> None:
        if rank._quiet:  # noqa: SLF001  (for speed: there is hardly ever one)
            self._quiet.update(rank.take_quiet())

    def _updated(self) -> None:
        if self._quiet:
            quiet, self._quiet = self._quiet, Counter()
            self.side.reuse.quiet(quiet)
        self._keep_time_of_offers()
        self.woken = True

    def _hear(self, message: Message) -> None:
        self.side.hear(message)
        if isinstance(message, PushOrdered) and message.reuse:
            self._expect_reading(message)

    def _expect_reading(self, message: Message) -> None:
        self._ordered_s[message.key] = self.world.now
        self.world.after(UNREAD_MAX_S, self.process, self._has_read, message)

    def _has_read(self, message: Message) -> None:
        """Rule 2: what this engine knows, it tells at once; prefill waits for its word."""
        since_s = max(self.process.resumed_at_s, self._ordered_s[message.key])  # it may have been repeated meanwhile
        if self.world.now - since_s < UNREAD_MAX_S - CLOCK_STEP_S:
            self._expect_reading(message)
        elif not self._busy and any(message is heard for heard in self.side.heard):
            self.world.violate("2", message.key, f"{self.name} has an order for {UNREAD_MAX_S} s and does not read it")

    def _keep_time(self) -> None:
        """As the link does a few times a second; here, when an offer ends."""
        self._keeps_time = False
        self.side.keep_time()
        self._keep_time_of_offers()

    def _keep_time_of_offers(self) -> None:
        offers = self.side.reuse.retention.offers
        if offers and not self._keeps_time:
            self._keeps_time = True
            superseded = self.side.reuse.retention._superseded.values()  # noqa: SLF001  (the link looks all the time)
            left_s = min([held.expires_s for held in offers.values()] + [*superseded]) - self.world.local_s()
            self.world.after(
                max(left_s, KEEP_TIME_S) + KEEP_TIME_S * self.world.rng.random(), self.process, self._keep_time
            )
