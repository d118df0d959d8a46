"""The reuse process: decode, ask the core, write, publish, count. Any number of them share the work by queue group."""

import contextlib
import secrets
from collections import Counter
from dataclasses import replace
from time import monotonic

import structlog

from kvbus.bus import Bucket, Bus
from kvbus.conversations_client import REUSE
from kvbus.errors import BusError
from kvbus.reuse.announced import Announced
from kvbus.reuse.core import (
    WHY_WITHDRAWN,
    Found,
    Verdict,
    flaw_of,
    is_key,
    judge_ask,
    judge_offer,
    judge_withdrawal,
    newest,
)
from kvbus.reuse.engines import Engines, Standing
from kvbus.reuse.memory import Memory
from kvbus.reuse.past import deaf_s, heard_before, known_s, note_listening
from kvbus.reuse.settings import ReuseSettings
from kvbus.reuse.store import Store
from kvbus_schemas import (
    AnyMessage,
    EngineCard,
    MessageTooLargeError,
    Post,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseWithdrawn,
    UndecodableError,
    decode,
    subjects,
)

TRANSFER_ID_BYTES = 16
TICK_S = 2.0

log = structlog.get_logger(__name__)


class ReuseService:
    """One reuse process on its bus. What must last is in the bucket; what is in here is a cache of what others say."""

    def __init__(self, bus: Bus, settings: ReuseSettings) -> None:
        self.counters: Counter[tuple[str, str]] = Counter()
        """(what came in, what became of it)."""
        self.engines = Engines(monotonic())
        self.key_count = 0
        """Keys in the bucket at the last tick."""
        self._bus = bus
        self._settings = settings
        self._rules = settings.rules
        self._memory = Memory(settings.memory_max)
        self._announced = Announced()
        self._reconnects = bus.counters.reconnects
        self._store: Store
        self._bucket: Bucket
        self._leases: Bucket

    @property
    def claims_lost(self) -> int:
        """Rounds in which another process, or another question, was faster."""
        return self._store.lost

    async def start(self) -> None:
        """Answer from now on. Raises BusError."""
        settings = self._settings
        self._bucket = await self._bus.bucket(
            subjects.CONVERSATIONS_BUCKET,
            ttl_hint_s=settings.lifetime_max_s,
            storage=settings.storage,
            replicas=settings.replicas,
        )
        self._leases = await self._bus.bucket(subjects.LEASES_BUCKET)
        self._store = Store(self._bucket)
        engines = await self._bus.bucket(subjects.ENGINES_BUCKET)
        await engines.watch(self._on_card)
        await self._bus.subscribe(subjects.of_kind(ReuseWithdrawn), self._remember)
        await self._bus.subscribe(subjects.of_kind(ReuseOffered, to=REUSE), self._announce)
        for _ in range(settings.lanes):
            for kind in (ReuseOffered, ReuseWithdrawn):
                await self._bus.subscribe(subjects.of_kind(kind, to=REUSE), self._on_fact, queue=REUSE)
            await self._bus.respond(subjects.of_kind(ReuseAsked, to=REUSE), self._on_ask, queue=REUSE)
        self._bus.on_connected.append(self._on_reconnect)

    async def catch_up(self) -> int:
        """Take what was said while nobody listened; how many messages that was. Repeats change nothing."""
        since_s = await deaf_s(self._leases, at_most_s=self._settings.catch_up_max_s)
        if self._settings.storage == "memory":  # what was claimed before the bucket was lost must not be stored again
            since_s = min(since_s, await known_s(self._leases))
        await note_listening(self._leases)
        past = await heard_before(self._bus, since_s=since_s)
        for age_s, message in past:
            if isinstance(message, ReuseWithdrawn):
                self._remember(message)
            await self._on_fact(message, age_s)
        log.info("reuse_caught_up", messages=len(past), since_s=round(since_s, 1))
        return len(past)

    async def tick(self) -> None:
        """Every TICK_S: tell the next process that this one listens; count the keys. Raises BusError."""
        if not self._bus.connected:
            return
        await note_listening(self._leases)
        info = await self._bucket._jetstream.info(self._bucket.stream)  # noqa: SLF001  (Bucket has no count of its own)
        self.key_count = int(info["state"]["messages"]) if info else 0

    # Facts

    async def _on_fact(self, message: AnyMessage, age_s: float = 0.0) -> None:
        if isinstance(message, ReuseOffered):
            await self._on_offer(message, age_s)
        elif isinstance(message, ReuseWithdrawn):
            await self._on_withdrawal(message)

    async def _on_offer(self, offer: ReuseOffered, age_s: float) -> None:
        if flaw := flaw_of(offer):
            self._refuse("offers", flaw, offer)
            return
        rules = self._rules
        standing = self.engines.standing(offer.engine_id, offer.incarnation, monotonic())
        verdict = await self._store.settle(
            offer.conversation,
            lambda found: judge_offer(
                offer,
                found,
                rules,
                standing=standing,
                old_is_live=self._holder_standing(found) == "live",
                age_s=age_s,
            ),
        )
        if verdict is not None and verdict.write is not None:
            self._memory.note(offer.conversation, verdict.write.over or "expired")
        await self._carry_on("offers", verdict)

    async def _on_withdrawal(self, message: ReuseWithdrawn) -> None:
        if flaw := flaw_of(message):
            self._refuse("withdrawals", flaw, message)
            return
        verdict = await self._store.settle(message.conversation, lambda found: judge_withdrawal(message, found))
        await self._carry_on("withdrawals", verdict)

    def _remember(self, message: AnyMessage) -> None:
        """Every process hears every withdrawal, so that any can say why a key is missing."""
        if isinstance(message, ReuseWithdrawn) and not flaw_of(message):
            self._memory.note(message.conversation, WHY_WITHDRAWN[message.reason])

    def _announce(self, message: AnyMessage) -> None:
        """Every process hears every offer, so that any can grant it before it is stored."""
        if isinstance(message, ReuseOffered) and not flaw_of(message):
            self._announced.note(message, monotonic())

    # Questions

    async def _on_ask(self, asked: AnyMessage) -> ReuseAnswered | None:
        if not isinstance(asked, ReuseAsked) or not is_key(asked.conversation):
            self._refuse("asks", "conversation", asked)
            return None
        try:
            verdict = await self._settle_ask(asked)
        except BusError as error:
            log.warning("reuse_look_up_failed", conversation=asked.conversation, error=str(error))
            self.counters["asks", "unavailable"] += 1
            return ReuseAnswered(conversation=asked.conversation, miss="unavailable")
        await self._carry_on("asks", verdict)
        if verdict is None or verdict.answer is None:
            return ReuseAnswered(conversation=asked.conversation, miss="claimed")
        if verdict.event == "engine_gone":
            self._memory.note(asked.conversation, "engine_gone")
        log.debug("reuse_answered", conversation=asked.conversation, outcome=verdict.event)
        return verdict.answer

    async def _settle_ask(self, asked: ReuseAsked) -> Verdict | None:
        transfer_id = secrets.token_hex(TRANSFER_ID_BYTES)

        def judge(found: Found | None) -> Verdict:
            there, posts = self._newest(asked.conversation, found)
            verdict = judge_ask(
                asked,
                there,
                self._rules,
                standing=self._holder_standing(there),
                transfer_id=transfer_id,
                if_missing=self._memory.why_missing(asked.conversation),
            )
            return replace(verdict, posts=posts + verdict.posts) if verdict.write else verdict

        return await self._store.settle(asked.conversation, judge)

    def _newest(self, conversation: str, found: Found | None) -> tuple[Found | None, tuple[Post, ...]]:
        """What was found, or what has been announced since."""
        self._note_return()
        now_s = monotonic()
        age_s, offer = self._announced.of(conversation, now_s)
        standing = self.engines.standing(offer.engine_id, offer.incarnation, now_s) if offer else "unknown"
        old_is_live = self._holder_standing(found) == "live"
        return newest(found, offer, self._rules, standing=standing, old_is_live=old_is_live, age_s=age_s)

    # Steps

    def _holder_standing(self, found: Found | None) -> Standing:
        record = found.record if found else None
        if record is None:
            return "unknown"
        return self.engines.standing(record.engine_id, record.incarnation, monotonic())

    def _refuse(self, what: str, flaw: str, message: AnyMessage) -> None:
        self.counters[what, "invalid"] += 1
        log.warning("reuse_message_invalid", kind=type(message).__name__, source=message.source, flaw=flaw)

    async def _carry_on(self, what: str, verdict: Verdict | None) -> None:
        """Count a verdict that was carried out, and say what follows from it."""
        self.counters[what, "lost" if verdict is None else verdict.event] += 1
        for post in () if verdict is None else verdict.posts:
            await self._post(post)

    async def _post(self, post: Post) -> None:
        try:
            await self._bus.publish(post.message, post.to)
            self.counters["released", getattr(post.message, "reason", "")] += 1
        except (BusError, MessageTooLargeError, subjects.SubjectTokenError) as error:
            log.warning("post_not_sent", kind=type(post.message).__name__, to=post.to, error=str(error))

    def _on_card(self, key: str, value: bytes | None) -> None:
        with contextlib.suppress(UndecodableError):
            card = decode(value) if value is not None else None
            if isinstance(card, EngineCard) and card.engine_id == key:
                self.engines.seen(card)
            elif value is None:
                self._note_return()
                self.engines.vanished(key, monotonic())

    def _note_return(self) -> None:
        """A bucket in memory is empty after its server's restart, and its watch says so before anything else."""
        if self._reconnects != self._bus.counters.reconnects:
            self._reconnects = self._bus.counters.reconnects
            self.engines.reconnected(monotonic())
            if self._settings.storage == "memory":  # of what was announced, something may have been claimed
                self._announced = Announced()

    async def _on_reconnect(self) -> None:
        self._note_return()
        await self.catch_up()
