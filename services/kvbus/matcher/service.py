"""The matcher as a process: decode, call the core, publish, log. The active one publishes, a standby only listens."""

import contextlib
from collections import deque
from time import monotonic

import structlog

from kvbus.bus import Bus
from kvbus.errors import BusError
from kvbus.matcher.core import MatcherCore
from kvbus.matcher.lease import Lease
from kvbus.matcher.partition import Partition
from kvbus.matcher.past import heard_before
from kvbus.matcher.settings import MatcherSettings
from kvbus.presence import Cards
from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    MessageTooLargeError,
    Post,
    PushOrdered,
    TransferClosed,
    UndecodableError,
    decode,
    subjects,
)

MATCHER = "matcher"
OWN_MATCHER = "matcher"
"""Capability on the card of an engine that needs no matcher process."""
TICK_S = 0.25
UNSENT_MAX = 10_000
"""Posts that are kept while this matcher may not publish, the newest; consumers that miss one ask again."""
UNSENT_MAX_AGE_S = 60.0
HEARD = (
    *(subjects.of_kind(kind, to=MATCHER) for kind in (BlocksRegistered, BlocksReady)),
    *(subjects.of_kind(kind) for kind in (BlocksUnavailable, TransferClosed, CancelOrdered)),
)
"""Ends are heard whoever they are for, so that their senders need not tell the matcher as well."""

log = structlog.get_logger(__name__)


class MatcherService:
    """One matcher process on its bus."""

    def __init__(self, bus: Bus, settings: MatcherSettings, lease: Lease) -> None:
        self.core = MatcherCore(
            transfers_max=settings.transfers_max,
            tombstone_s=settings.tombstone_s,
            tombstones_max=settings.tombstones_max,
            engine_unknown_max_s=settings.engine_unknown_max_s,
        )
        self._bus = bus
        self._settings = settings
        self._partition = Partition.parse(settings.partition)
        self._lease = lease
        self._cards = Cards()
        self._self_matching: set[str] = set()
        """Producers that pair their own transfers (setting `matcher = engine`)."""
        self._seq = 0
        self._caught_up = False
        self._publishing = False
        self._unsent: deque[tuple[float, Post]] = deque(maxlen=UNSENT_MAX)

    def is_active(self) -> bool:
        """True while this process's word counts."""
        return self._caught_up and self._bus.connected and self._lease.is_held(monotonic())

    async def start(self) -> None:
        """Hear everything from now on, then what was said before."""
        for subject in HEARD:
            await self._bus.subscribe(subject, self._on_message)
        engines = await self._bus.bucket(subjects.ENGINES_BUCKET)
        await engines.watch(self._on_card)
        self._bus.on_connected.append(self._on_reconnect)
        await self._catch_up()

    async def tick(self) -> None:
        """Let time pass in the core, and publish what was held back once this process is the active one."""
        now_s = monotonic()
        for engine_id, incarnation in self._cards.gone(now_s):
            log.info("engine_gone", engine_id=engine_id, incarnation=incarnation)
            await self._give(self.core.engine_gone(engine_id, incarnation, now_s))
        await self._give(self.core.tick(now_s))
        while self.core.contradictions:
            error = self.core.contradictions.popleft()
            story = [(round(at_s - now_s, 3), type(message).__name__, message.source) for at_s, message in error.story]
            log.error("contradiction", transfer_id=error.transfer_id, text=error.text, story=story)
        if self.is_active() != self._publishing:
            await self._change_over()

    async def _on_message(self, message: AnyMessage) -> None:
        if self._concerns(message):
            await self._give(self.core.receive(message, monotonic()))

    def _concerns(self, message: AnyMessage) -> bool:
        """Only a producer itself can say that its blocks are unavailable: matchers hear their own answers too."""
        if isinstance(message, BlocksUnavailable) and message.source != message.producer_id:
            return False
        return self._partition.owns(message) and getattr(message, "producer_id", "") not in self._self_matching

    async def _on_card(self, key: str, value: bytes | None) -> None:
        with contextlib.suppress(UndecodableError):
            card = decode(value) if value is not None else None
            if isinstance(card, EngineCard):
                self._cards.seen(card)
                mark = self._self_matching.add if OWN_MATCHER in card.capabilities else self._self_matching.discard
                mark(card.engine_id)
                await self._give(self.core.engine_seen(card, monotonic()))
            elif value is None:
                self._cards.vanished(key, monotonic())

    async def _on_reconnect(self) -> None:
        self._publishing = False
        self._cards.reconnected(monotonic())
        await self._catch_up()

    async def _catch_up(self) -> None:
        """What was held back goes out only once it is clear what has happened meanwhile."""
        self._caught_up = False
        self._seq, past = await heard_before(self._bus, HEARD, since_seq=self._seq, since_s=self._settings.lease_max_s)
        for age_s, message in past:
            if self._concerns(message):
                await self._give(self.core.receive(message, monotonic(), age_s))
        self._caught_up = True

    async def _change_over(self) -> None:
        self._publishing = self.is_active()
        log.info("matcher_active" if self._publishing else "matcher_standby", open_transfers=self.core.open_count)
        if self._publishing:
            since_s, held_back = monotonic() - UNSENT_MAX_AGE_S, [*self._unsent]
            self._unsent.clear()
            fresh = [post for at_s, post in held_back if at_s > since_s and not isinstance(post.message, PushOrdered)]
            await self._give([post for post in fresh if self.core.is_wanted(post)])
            await self._give(self.core.standing_orders(monotonic()))

    async def _give(self, posts: list[Post]) -> None:
        for post in posts:
            if not (self._publishing and self.is_active()):
                self._unsent.append((monotonic(), post))
                continue
            try:
                await self._bus.publish(post.message, post.to)
                log.debug("said", kind=type(post.message).__name__, to=post.to, key=post.message.key)
            except (BusError, MessageTooLargeError, subjects.SubjectTokenError) as error:
                log.warning("post_not_sent", kind=type(post.message).__name__, to=post.to, error=str(error))
