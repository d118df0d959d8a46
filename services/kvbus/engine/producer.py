"""The producer's half of a transfer, as the scheduler sees it: compute, hold, and let go.

    COMPUTING ──finished──► HOLDING ──ranks report sent──► gone
        │ aborted              │ closed, cancelled, lease over, consumer gone
        ▼                      ▼
    (unavailable) ──────────► RELEASED ──ranks report sent──► gone

Blocks are held from the moment the request finishes until every rank has reported it as sent, which a rank does
once all blocks are written, or once the transfer is released and nothing of it is in flight.

This is a core: facts and the time in, `ProducerSteps` out; no clock, no I/O.
"""

from dataclasses import dataclass, field

from kvbus.engine.facts import MATCHER, Terms
from kvbus_schemas import (
    BlocksReady,
    BlocksUnavailable,
    CancelOrdered,
    Message,
    Post,
    Ticket,
    TransferClosed,
)

TOMBSTONES_MAX = 4096
"""Transfers that are remembered after their end, so that a ticket used twice is noticed."""


@dataclass
class ProducerSteps:
    """What has to happen now."""

    posts: list[Post] = field(default_factory=list)
    admitted: list[Terms] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.posts or self.admitted or self.held or self.released or self.dropped)


@dataclass
class Production:
    """One transfer that this engine computes or holds."""

    terms: Terms
    ticket: Ticket
    since_s: float
    deadline_s: float
    consumer_id: str
    consumer_incarnation: str
    finished: bool = False
    released: bool = False


class ProducerCore:
    """All transfers that one engine produces. `me` is its engine_id, `block_size` its tokens per block."""

    def __init__(self, me: str, block_size: int) -> None:
        self.me = me
        self.block_size = block_size
        self.open: dict[str, Production] = {}
        self.by_request: dict[str, str] = {}
        self.tombstones: dict[str, None] = {}

    def admit(self, ticket: Ticket, terms: Terms, now_s: float) -> ProducerSteps:
        """A request with a producer's ticket has its first blocks. A ticket that was used before is ignored."""
        transfer_id = terms.transfer_id
        if transfer_id in self.open or transfer_id in self.tombstones:
            return ProducerSteps()
        self.open[transfer_id] = Production(
            terms=terms,
            ticket=ticket,
            since_s=now_s,
            deadline_s=now_s + ticket.deadline_s,
            consumer_id=ticket.consumer_id,
            consumer_incarnation=ticket.consumer_incarnation,
        )
        self.by_request[terms.request_id] = transfer_id
        return ProducerSteps(admitted=[terms])

    def knows(self, transfer_id: str) -> bool:
        """Whether the transfer is open here or has ended here."""
        return transfer_id in self.open or transfer_id in self.tombstones

    def transfer_of(self, request_id: str) -> str | None:
        """The open transfer of one of vLLM's requests."""
        return self.by_request.get(request_id)

    def finished(
        self, request_id: str, *, ok: bool, block_ids: list[list[int]], cached_tokens: int, now_s: float
    ) -> ProducerSteps:
        """vLLM's request has ended; `ok` when its whole prompt is computed. Its blocks stay held."""
        production = self.open[self.by_request[request_id]]
        production.finished = True
        transfer_id = production.terms.transfer_id
        if not ok:
            return self._give_up(production, "aborted", "the prefill request was aborted")
        ready = BlocksReady(
            transfer_id=transfer_id,
            producer_id=self.me,
            consumer_id=production.consumer_id,
            block_ids=block_ids,
            token_count=production.terms.token_count,
            prompt_digest=production.terms.prompt_digest,
            lease_s=max(round(production.deadline_s - now_s, 3), 0.001),
            computed_ms=round((now_s - production.since_s) * 1e3, 3),
            cached_tokens=cached_tokens,
            block_size=self.block_size,
        )
        steps = ProducerSteps(posts=[Post(MATCHER, ready)], held=[transfer_id])
        if production.released:
            steps.released.append(transfer_id)
        return steps

    def receive(self, message: Message) -> ProducerSteps:
        """Take a message; unknown transfers and repeats change nothing."""
        production = self.open.get(message.key)
        if production is None:
            return ProducerSteps()
        match message:
            case TransferClosed() | CancelOrdered():
                return self._release(production)
            case _:
                return ProducerSteps()

    def consumer_gone(self, engine_id: str, incarnation: str) -> ProducerSteps:
        """A consumer has died: nobody will take its blocks."""
        steps = ProducerSteps()
        for production in self.open.values():
            if production.consumer_id == engine_id and production.consumer_incarnation in ("", incarnation):
                _merge(steps, self._release(production))
        return steps

    def consumer_known(self, transfer_id: str, consumer_id: str, incarnation: str) -> None:
        """An order has named the consumer of a deferred transfer."""
        production = self.open.get(transfer_id)
        if production is not None:
            production.consumer_id, production.consumer_incarnation = consumer_id, incarnation

    def drop(self, request_id: str) -> ProducerSteps:
        """vLLM's request has ended before it computed anything (it waited for a conversation's KV)."""
        production = self.open[self.by_request[request_id]]
        steps = self._give_up(production, "aborted", "the prefill request was aborted")
        self.reported(request_id)
        return ProducerSteps(posts=steps.posts, dropped=[production.terms.transfer_id])

    def reported(self, request_id: str) -> None:
        """All ranks have reported the request as sent: vLLM frees its blocks."""
        transfer_id = self.by_request.pop(request_id, None)
        if transfer_id is None:
            return
        del self.open[transfer_id]
        self.tombstones[transfer_id] = None
        if len(self.tombstones) > TOMBSTONES_MAX:
            del self.tombstones[next(iter(self.tombstones))]

    def tick(self, now_s: float) -> ProducerSteps:
        """Let go of what nobody came for within its deadline."""
        steps = ProducerSteps()
        for production in self.open.values():
            if now_s >= production.deadline_s and not production.released:
                _merge(steps, self._give_up(production, "expired", "nobody took the blocks within the deadline"))
        return steps

    def holding(self) -> bool:
        """Whether finished requests still hold blocks."""
        return any(production.finished for production in self.open.values())

    def _give_up(self, production: Production, reason: str, detail: str) -> ProducerSteps:
        assert reason in ("aborted", "expired")
        unavailable = BlocksUnavailable(
            transfer_id=production.terms.transfer_id,
            producer_id=self.me,
            reason="aborted" if reason == "aborted" else "expired",
            detail=detail,
        )
        steps = self._release(production, again=True)
        steps.posts.append(Post(production.consumer_id or MATCHER, unavailable))
        return steps

    def _release(self, production: Production, *, again: bool = False) -> ProducerSteps:
        if production.released and not again:
            return ProducerSteps()
        production.released = True
        transfer_id = production.terms.transfer_id
        held = [transfer_id] if production.finished else []
        return ProducerSteps(held=held, released=[transfer_id])


def _merge(steps: ProducerSteps, more: ProducerSteps) -> None:
    steps.posts += more.posts
    steps.admitted += more.admitted
    steps.held += more.held
    steps.released += more.released
