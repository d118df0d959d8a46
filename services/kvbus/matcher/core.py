"""The matcher: pairs a consumer's registration with its producer. Pure: messages and the time in, posts out.

Theory of operation. A transfer is keyed by `transfer_id`, an opaque string that the router made new for this
dispatch. The registration alone decides: as soon as it is valid its order goes to the producer, which prepares while
it still computes and fires when it has both, so no order waits for BlocksReady. BlocksReady is only compared.

    state      on                                 becomes    posts
    (none)     BlocksRegistered, valid            ordered    PushOrdered -> producer
    (none)     BlocksRegistered, engine unknown   held       (nothing; at most `engine_unknown_max_s`)
    (none)     BlocksRegistered, invalid          over       BlocksUnavailable -> consumer, and producer if known
    (none)     BlocksReady                        ready      (nothing)
    held       the missing card / too long        ordered / over, as above
    ordered    BlocksReady that contradicts       over       CancelOrdered -> both
    ordered    another BlocksRegistered           ordered    BlocksUnavailable -> its sender: the first one stands
    any        BlocksUnavailable of the producer  over       BlocksUnavailable -> consumer, if registered
    any        CancelOrdered, TransferClosed      over       (nothing: their senders told the engines)
    any        producer gone                      over       BlocksUnavailable -> consumer, if registered
    any        consumer gone                      over       CancelOrdered -> producer
    any        lease over                         over       (nothing: both sides have that clock themselves)
    over       BlocksRegistered                   over       BlocksUnavailable -> its sender, unless it closed it

What is over stays a tombstone for a while. A message that is delivered again changes nothing; a fact that is
published again (another `seq`) repeats its answer, so that a consumer can ask again after an answer was lost.
Feeding a recording into a fresh core ends in the same state as the first run.
"""

from collections import Counter, deque

from kvbus.matcher import checks
from kvbus.matcher.book import Book, Contradiction, Transfer
from kvbus.matcher.checks import Refusal
from kvbus.matcher.engines import Engines
from kvbus.matcher.tombstones import Tombstone, delivery_of
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    Message,
    Post,
    PushOrdered,
    TransferClosed,
)
from kvbus_schemas.transfer import UnavailableReason


class MatcherCore:
    """All transfers of a bus, or of one partition of it. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        *,
        transfers_max: int = 10_000,
        tombstone_s: float = 300.0,
        tombstones_max: int = 100_000,
        engine_unknown_max_s: float = 1.0,
    ) -> None:
        self._book = Book(transfers_max, tombstone_s, tombstones_max)
        self._engine_unknown_max_s = engine_unknown_max_s
        self._engines = Engines()
        self.counters: Counter[str] = self._book.counters
        """registered, ordered, ready, closed, cancelled, unavailable, expired, contradictions, dropped."""
        self.refused: Counter[str] = self._book.refused
        """Refused registrations by the code of the refusal."""
        self.contradictions: deque[Contradiction] = self._book.contradictions
        """Errors with their stories, for the shell to take and log."""

    # What the shell asks

    @property
    def open_count(self) -> int:
        """Transfers that are known and not over."""
        return len(self._book.open)

    @property
    def tombstone_count(self) -> int:
        return len(self._book.over)

    @property
    def engine_count(self) -> int:
        return len(self._engines)

    def standing_orders(self, now_s: float) -> list[Post]:
        """The orders of all open transfers again, with what is left of their leases: for a matcher that takes over."""
        self._book.advance(now_s)
        return [post for transfer in self._book.open.values() if (post := self._order_again(transfer))]

    def is_wanted(self, post: Post) -> bool:
        """False if `post`, made earlier and not yet published, would tell a consumer what it has closed itself."""
        tombstone = self._book.over.get(post.message.key)
        return tombstone is None or not (tombstone.closed_by or isinstance(post.message, PushOrdered))

    # Facts in, posts out

    def receive(self, message: Message, now_s: float, age_s: float = 0.0) -> list[Post]:
        """Take one message; `age_s` is how long ago it was sent, above 0 only for what comes out of the stream."""
        self._book.advance(now_s)
        match message:
            case BlocksRegistered():
                return self._registered(message, age_s)
            case BlocksReady():
                return self._ready(message, age_s)
            case BlocksUnavailable():
                return self._unavailable(message)
            case CancelOrdered():
                return self._end(message, "cancelled", "aborted", f"cancelled: {message.reason}")
            case TransferClosed():
                return self._closed(message)
            case _:
                return self._book.drop()

    def engine_seen(self, card: EngineCard, now_s: float | None = None) -> list[Post]:
        """An engine lives. A card with another incarnation ends all that the one before it had open."""
        self._book.advance(now_s)
        is_renewal = self._engines.find(card.engine_id, card.incarnation) is not None
        before = self._engines.seen(card)
        posts = [] if before is None else self._abandon(card.engine_id, before)
        held = [] if is_renewal else [transfer for transfer in self._book.open.values() if transfer.is_held]
        return posts + [post for transfer in held for post in self._consider(transfer)]

    def engine_gone(self, engine_id: str, incarnation: str, now_s: float | None = None) -> list[Post]:
        """An engine's card has expired or was withdrawn. Nothing happens if another incarnation lives by now."""
        self._book.advance(now_s)
        if not self._engines.lost(engine_id, incarnation):
            return []
        return self._abandon(engine_id, incarnation)

    def tick(self, now_s: float) -> list[Post]:
        """Let time pass: leases end, registrations for engines that do not show up are refused, tombstones go."""
        self._book.advance(now_s)
        self._book.over.drop_old(self._book.now_s)
        posts: list[Post] = []
        for key, transfer in list(self._book.open.items()):
            if transfer.expires_s <= self._book.now_s:
                self._book.finish(key, "expired", "the lease is over")
                self._book.counters["expired"] += 1
            elif transfer.is_held:
                posts += self._consider(transfer)
        return posts

    # One kind of message each

    def _registered(self, registration: BlocksRegistered, age_s: float) -> list[Post]:
        key, left_s = registration.transfer_id, registration.lease_s - age_s
        transfer, tombstone = self._book.open.get(key), self._book.over.get(key)
        if age_s > 0 and left_s <= 0:
            return self._book.drop()
        if tombstone is not None:
            return self._answer_late(tombstone, registration)
        if transfer is not None and transfer.registration is not None:
            return self._registered_again(transfer, transfer.registration, registration)
        self._book.counters["registered"] += 1
        if refusal := checks.check_alone(registration, left_s):
            return self._refuse(registration, refusal)
        transfer = self._book.admit(key, self._book.now_s + left_s)
        if transfer is None:
            text = f"matcher_full: {self._book.transfers_max} transfers are open, which is the limit"
            return self._refuse(registration, Refusal("matcher_full", text))
        transfer.registration, transfer.delivery = registration, delivery_of(registration)
        transfer.expires_s = self._book.now_s + left_s
        transfer.held_until_s = self._book.now_s + self._engine_unknown_max_s
        self._book.note(transfer, registration)
        return self._consider(transfer)

    def _registered_again(
        self, transfer: Transfer, first: BlocksRegistered, registration: BlocksRegistered
    ) -> list[Post]:
        if checks.same_facts(first, registration):
            if transfer.delivery == delivery_of(registration):
                return []
            transfer.delivery = delivery_of(registration)
            return [post] if (post := self._order_again(transfer)) else []
        if transfer.contradicted == delivery_of(registration):
            return []
        transfer.contradicted = delivery_of(registration)
        text = f"another registration of this transfer stands, by {first.consumer_id!r}"
        self._book.contradicts(transfer, registration, text)
        self._book.refused["contradiction"] += 1
        return [Post(registration.consumer_id, checks.unavailable_to(registration, "refused", text))]

    def _ready(self, ready: BlocksReady, age_s: float) -> list[Post]:
        key = ready.transfer_id
        if key in self._book.over or ready.lease_s <= age_s:
            return self._book.drop()
        transfer = self._book.admit(key, self._book.now_s + ready.lease_s - age_s)
        if transfer is None:
            return self._book.drop()
        self._book.note(transfer, ready)
        first, transfer.ready = transfer.ready, ready
        self._book.counters["ready"] += first is None
        refusal = None
        if transfer.registration is not None:
            refusal = checks.check_ready(transfer.registration, ready)
        elif first is not None:
            refusal = checks.check_repeat(first, ready)
        return self._cancel_both(key, transfer, ready, refusal.text) if refusal else []

    def _unavailable(self, message: BlocksUnavailable) -> list[Post]:
        transfer = self._book.open.get(message.transfer_id)
        registration = transfer.registration if transfer else None
        if registration and registration.producer_id != message.producer_id:
            return self._book.drop()
        self._end(message, "unavailable", message.reason, message.detail or f"said by {message.producer_id!r}")
        if registration is None:
            return []
        return [Post(registration.consumer_id, checks.unavailable_to(registration, message.reason, message.detail))]

    def _closed(self, message: TransferClosed) -> list[Post]:
        transfer = self._book.open.get(message.transfer_id)
        registration = transfer.registration if transfer else None
        if registration and registration.consumer_id != message.consumer_id:
            return self._book.drop()
        self._end(message, "closed", "refused", f"the transfer was closed before: {message.outcome}")
        if tombstone := self._book.over.get(message.transfer_id):
            tombstone.closed_by = tombstone.closed_by or message.consumer_id
        return []

    def _end(self, message: Message, counter: str, reason: UnavailableReason, detail: str) -> list[Post]:
        self._book.counters[counter] += message.key not in self._book.over
        self._book.finish(message.key, reason, detail)
        return []

    # Steps

    def _consider(self, transfer: Transfer) -> list[Post]:
        """Order, refuse, or go on holding a registration that has no order yet."""
        registration = transfer.registration
        assert registration is not None
        producer = self._engines.find(registration.producer_id, registration.producer_incarnation)
        consumer = self._engines.find(registration.consumer_id, registration.consumer_incarnation)
        if producer is None or consumer is None:
            overdue = transfer.held_until_s <= self._book.now_s
            refusal = self._engines.missing(registration, overdue=overdue)
            return self._refuse(registration, refusal) if refusal else []
        refusal = checks.check_pair(registration, producer, consumer)
        if refusal is None and transfer.ready is not None:
            refusal = checks.check_ready(registration, transfer.ready)
        if refusal is not None:
            return self._refuse(registration, refusal)
        transfer.ordered_to = producer.incarnation
        self._book.counters["ordered"] += 1
        post = self._order_again(transfer)
        return [post] if post else []

    def _refuse(self, registration: BlocksRegistered, refusal: Refusal) -> list[Post]:
        reason: UnavailableReason = "producer_gone" if refusal.code == "producer_gone" else "refused"
        self._book.refused[refusal.code] += 1
        self._book.finish(registration.transfer_id, reason, refusal.text)
        tombstone = self._book.over.put(registration.transfer_id, reason, refusal.text, self._book.now_s)
        tombstone.answered = delivery_of(registration)
        told = [registration.consumer_id]
        if self._engines.named(registration.producer_id) and registration.producer_id not in told:
            told.append(registration.producer_id)
        return [Post(to, checks.unavailable_to(registration, reason, refusal.text)) for to in told]

    def _answer_late(self, tombstone: Tombstone, registration: BlocksRegistered) -> list[Post]:
        if tombstone.closed_by == registration.consumer_id or tombstone.answered == delivery_of(registration):
            return []
        self._book.refused["tombstone"] += 1
        tombstone.answered = delivery_of(registration)
        return [Post(registration.consumer_id, checks.unavailable_to(registration, tombstone.reason, tombstone.detail))]

    def _order_again(self, transfer: Transfer) -> Post | None:
        registration, incarnation = transfer.registration, transfer.ordered_to
        if registration is None or incarnation is None:
            return None
        return Post(
            registration.producer_id, checks.order_of(registration, incarnation, transfer.expires_s - self._book.now_s)
        )

    def _cancel_both(self, key: str, transfer: Transfer, message: BlocksReady, text: str) -> list[Post]:
        registration = transfer.registration
        self._book.contradicts(transfer, message, text)
        self._book.finish(key, "refused", text)
        consumer_id = registration.consumer_id if registration else ""
        producers = {registration.producer_id if registration else message.producer_id: None, message.producer_id: None}
        cancel = CancelOrdered(transfer_id=key, reason=text, consumer_id=consumer_id)
        return [Post(to, cancel) for to in (*producers, consumer_id) if to]

    def _abandon(self, engine_id: str, incarnation: str) -> list[Post]:
        """End all that an engine which is gone had open; the other side is told at once."""
        posts: list[Post] = []
        for key, transfer in list(self._book.open.items()):
            registration, ready = transfer.registration, transfer.ready
            if registration is None:
                if ready is not None and ready.producer_id == engine_id and ready.incarnation in ("", incarnation):
                    self._book.finish(key, "producer_gone", f"engine {engine_id!r} is gone")
            elif registration.producer_id == engine_id and transfer.ordered_to == incarnation:
                detail = f"engine {engine_id!r} is gone"
                self._book.finish(key, "producer_gone", detail)
                posts.append(
                    Post(registration.consumer_id, checks.unavailable_to(registration, "producer_gone", detail))
                )
            elif (registration.consumer_id, registration.consumer_incarnation) == (engine_id, incarnation):
                self._book.finish(key, "aborted", f"consumer {engine_id!r} is gone")
                cancel = CancelOrdered(transfer_id=key, reason="consumer_gone")
                posts.append(Post(registration.producer_id, cancel))
        return posts
