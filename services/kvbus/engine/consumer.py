"""The consumer's half of a transfer, as the scheduler sees it: register, wait, and give every block back.

    WAITING ──reported landed──────────────────────────► CLOSED (completed)
       │ unavailable, failed, cancelled, aborted, expired
       ▼
    DRAINING ── every producer rank quiesced, or fenced ──► CONCLUDED ──reported──► CLOSED (failed, cancelled, expired)

A draining transfer repeats its CancelOrdered until all ranks have answered, so that a lost message costs time and
nothing else. Blocks that somebody may still write into are never given back: a producer that has gone silent
counts as quiet only `fence_s` after it was last known alive. Every transfer posts exactly one TransferClosed.

This is a core: facts and the time in, `Steps` out; no clock, no I/O.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from kvbus.engine.facts import MATCHER
from kvbus.engine.peers import Peers
from kvbus_schemas import (
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    Message,
    Outcome,
    Post,
    PushDone,
    PushFailed,
    PushQuiesced,
    TransferClosed,
)

REPEAT_S = 1.0
"""How often an unanswered CancelOrdered is said again."""
REGISTER_AGAIN_S = 2.0
"""When a registration is said again for the first time; then after four times as long, and so on."""
CLOSED_MAX = 4096
"""Transfers that are remembered after their end, so that late messages and reused tickets find them."""


class State(Enum):
    WAITING = auto()
    DRAINING = auto()
    CONCLUDED = auto()


@dataclass
class Steps:
    """What has to happen now."""

    posts: list[Post] = field(default_factory=list)
    conclude: dict[str, bool] = field(default_factory=dict)
    """Requests to give back to vLLM; True: as failed, to be recomputed."""
    hinted: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.posts or self.conclude or self.hinted)


@dataclass
class Waiting:
    """One transfer that this engine waits for."""

    registration: BlocksRegistered
    request_id: str
    since_s: float
    deadline_s: float
    producer_ranks: int
    state: State = State.WAITING
    outcome: Outcome = "completed"
    reason: str = ""
    aborted: bool = False
    done_ranks: set[int] = field(default_factory=set)
    quiet_ranks: set[int] = field(default_factory=set)
    again_s: float = 0.0
    """When to say again what was not answered."""
    patience_s: float = REGISTER_AGAIN_S
    hinted_s: float = 0.0


class ConsumerCore:
    """All transfers that one engine consumes. `me` is its engine_id."""

    def __init__(self, me: str, peers: Peers) -> None:
        self.me = me
        self.peers = peers
        self.open: dict[str, Waiting] = {}
        self.by_request: dict[str, str] = {}
        self.closed: dict[str, Outcome] = {}

    def register(self, registration: BlocksRegistered, request_id: str, now_s: float) -> Steps:
        """Blocks are allocated: tell the matcher, and wait at most the registration's lease."""
        transfer_id = registration.transfer_id
        assert transfer_id not in self.open and transfer_id not in self.closed, transfer_id
        self.open[transfer_id] = Waiting(
            registration=registration,
            request_id=request_id,
            since_s=now_s,
            deadline_s=now_s + registration.lease_s,
            producer_ranks=self.peers.ranks_of(registration.producer_id),
            again_s=now_s + REGISTER_AGAIN_S,
        )
        self.by_request[request_id] = transfer_id
        return Steps([Post(MATCHER, registration)])

    def skip(self, transfer_id: str, producer_id: str, reason: str) -> Steps:
        """The ticket needs no transfer (the prefix is here already): the producer, if any, may free at once."""
        if transfer_id in self.closed or transfer_id in self.open or not producer_id:
            return Steps()
        self._remember(transfer_id, "completed")
        closed = TransferClosed(
            transfer_id=transfer_id,
            producer_id=producer_id,
            consumer_id=self.me,
            outcome="completed",
            reason=reason,
        )
        return Steps([Post(producer_id, closed)])

    def knows(self, transfer_id: str) -> bool:
        """Whether the transfer is open here or has ended here: its ticket is used."""
        return transfer_id in self.open or transfer_id in self.closed

    def owner_of(self, transfer_id: str) -> str | None:
        """The request that waits for the transfer, if it is open."""
        waiting = self.open.get(transfer_id)
        return waiting.request_id if waiting else None

    def receive(self, message: Message, now_s: float) -> Steps:  # noqa: PLR0911  (one for each kind)
        """Take a message; unknown transfers and repeats change nothing."""
        waiting = self.open.get(message.key)
        if waiting is None or not _from_producer(message, waiting.registration):
            return Steps()
        match message:
            case PushDone():
                return self._done(waiting, message, now_s)
            case BlocksUnavailable():
                return self._drain(waiting, "failed", f"producer: {message.reason} {message.detail}".strip(), now_s)
            case PushFailed():
                return self._drain(waiting, "failed", f"rank {message.rank}: {message.reason}", now_s)
            case CancelOrdered() if message.source != self.me:
                return self._drain(waiting, "cancelled", message.reason, now_s)
            case PushQuiesced():
                return self._quiesced(waiting, message.rank, message.ranks)
            case _:
                pass
        return Steps()

    def aborted(self, request_id: str, now_s: float) -> Steps:
        """The engine's request has ended while it waited. Its blocks come back when the producer is quiet."""
        transfer_id = self.by_request.get(request_id)
        if transfer_id is None:
            return Steps()
        waiting = self.open[transfer_id]
        waiting.aborted = True
        return self._drain(waiting, "cancelled", "the client left", now_s)

    def producer_gone(self, engine_id: str, incarnation: str, now_s: float) -> Steps:
        """A producer has died: what it has not finished will not come."""
        steps = Steps()
        for waiting in list(self.open.values()):
            registration = waiting.registration
            if (registration.producer_id, registration.producer_incarnation) == (engine_id, incarnation):
                _merge(steps, self._drain(waiting, "failed", f"prefill {engine_id} is gone", now_s))
        return steps

    def reported(self, request_id: str, now_s: float, *, failed: bool | None = None) -> Steps:
        """The ranks have given the request back to vLLM: the transfer is over. `failed` is what they say of it: what
        has landed completely is used, whatever was said meanwhile. None: a request that was concluded has failed."""
        transfer_id = self.by_request.pop(request_id, None)
        if transfer_id is None:
            return Steps()
        waiting = self.open.pop(transfer_id)
        if failed is None:
            failed = waiting.state is State.CONCLUDED
        if waiting.state is not State.WAITING and not (failed or waiting.aborted):
            waiting.outcome, waiting.reason = "completed", f"landed all the same: {waiting.reason}"
        self._remember(transfer_id, waiting.outcome)
        closed = TransferClosed(
            transfer_id=transfer_id,
            producer_id=waiting.registration.producer_id,
            consumer_id=self.me,
            outcome=waiting.outcome,
            reason=waiting.reason,
            waited_ms=round((now_s - waiting.since_s) * 1e3, 3),
            start_ms=round((now_s - waiting.hinted_s) * 1e3, 3) if waiting.hinted_s else 0.0,
        )
        return Steps([Post(waiting.registration.producer_id, closed)])

    def tick(self, now_s: float) -> Steps:
        """What time brings: deadlines, fences, and saying again what was not answered."""
        steps = Steps()
        for waiting in list(self.open.values()):
            if waiting.state is State.WAITING and now_s >= waiting.deadline_s:
                _merge(steps, self._drain(waiting, "expired", "no push within the deadline", now_s))
            elif waiting.state is State.DRAINING and self._fenced(waiting, now_s):
                _merge(steps, self._conclude(waiting))
            elif now_s >= waiting.again_s:
                _merge(steps, self._say_again(waiting, now_s))
        return steps

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do at the latest, or None."""
        return min((waiting.again_s for waiting in self.open.values()), default=None)

    def _done(self, waiting: Waiting, message: PushDone, now_s: float) -> Steps:
        waiting.done_ranks.add(message.rank)
        if len(waiting.done_ranks) < message.ranks or waiting.state is not State.WAITING:
            return Steps()
        waiting.hinted_s = waiting.hinted_s or now_s
        return Steps(hinted=[waiting.registration.transfer_id])

    def _drain(self, waiting: Waiting, outcome: Outcome, reason: str, now_s: float) -> Steps:
        if waiting.state is not State.WAITING:
            return Steps()
        waiting.state = State.DRAINING
        waiting.outcome, waiting.reason = outcome, reason
        if self._fenced(waiting, now_s):
            return self._conclude(waiting)
        return self._cancel(waiting, now_s)

    def _cancel(self, waiting: Waiting, now_s: float) -> Steps:
        waiting.again_s = now_s + REPEAT_S
        order = CancelOrdered(transfer_id=waiting.registration.transfer_id, reason=waiting.reason, consumer_id=self.me)
        return Steps([Post(waiting.registration.producer_id, order)])

    def _quiesced(self, waiting: Waiting, rank: int, ranks: int) -> Steps:
        waiting.quiet_ranks.add(rank)
        if len(waiting.quiet_ranks) < ranks:
            return Steps()
        if waiting.state is State.WAITING:  # the producer stopped by itself: BlocksUnavailable is on its way
            waiting.state, waiting.outcome, waiting.reason = State.DRAINING, "failed", "the producer stopped"
        return self._conclude(waiting)

    def _conclude(self, waiting: Waiting) -> Steps:
        if waiting.state is State.CONCLUDED:
            return Steps()
        waiting.state = State.CONCLUDED
        return Steps(conclude={waiting.request_id: not waiting.aborted})

    def _fenced(self, waiting: Waiting, now_s: float) -> bool:
        registration = waiting.registration
        return self.peers.fenced(registration.producer_id, registration.producer_incarnation, now_s)

    def _say_again(self, waiting: Waiting, now_s: float) -> Steps:
        if waiting.state is State.DRAINING:
            return self._cancel(waiting, now_s)
        waiting.patience_s *= 4
        waiting.again_s = now_s + waiting.patience_s
        if waiting.state is not State.WAITING or waiting.done_ranks:
            return Steps()
        left_s = max(round(waiting.deadline_s - now_s, 3), 0.001)
        return Steps([Post(MATCHER, msgspec.structs.replace(waiting.registration, lease_s=left_s))])

    def _remember(self, transfer_id: str, outcome: Outcome) -> None:
        self.closed[transfer_id] = outcome
        if len(self.closed) > CLOSED_MAX:
            del self.closed[next(iter(self.closed))]


def _from_producer(message: Message, registration: BlocksRegistered) -> bool:
    """What ranks say counts only from the producer that was registered with, and from that incarnation of it: another
    engine's rank, or the restarted producer's, knows nothing of the WRITEs that may still land here."""
    if isinstance(message, BlocksUnavailable | PushDone | PushFailed | PushQuiesced):
        if message.producer_id != registration.producer_id:
            return False
        if isinstance(message, BlocksUnavailable):  # the matcher says it too
            return True
        return message.incarnation in ("", registration.producer_incarnation)
    return True


def _merge(steps: Steps, more: Steps) -> None:
    steps.posts += more.posts
    steps.conclude |= more.conclude
    steps.hinted += more.hinted
