"""One transfer on one producer rank: what is known of it, and the words that the rank says about it."""

from dataclasses import dataclass, field

from kvbus.engine.facts import MATCHER, Terms
from kvbus_schemas import Post, PushDone, PushFailed, PushOrdered, PushQuiesced
from kvbus_schemas.transfer import QuiesceState


@dataclass(frozen=True, slots=True)
class Write:
    """One contiguous run of prompt blocks to be written to one consumer."""

    write_id: str
    transfer_id: str
    consumer_id: str
    consumer_incarnation: str
    first: int
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


@dataclass
class Moves:
    """What has to happen now."""

    writes: list[Write] = field(default_factory=list)
    posts: list[Post] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    """Requests to report to vLLM as sent: each once."""

    def add(self, more: "Moves") -> None:
        self.writes += more.writes
        self.posts += more.posts
        self.sent += more.sent


@dataclass
class Push:
    """One transfer on this rank."""

    transfer_id: str
    terms: Terms | None = None
    order: PushOrdered | None = None
    lease_end_s: float = 0.0
    source: list[int] = field(default_factory=list)
    ready: int = 0
    final: bool = False
    final_s: float = 0.0
    next: int = 0
    """Position of the first block that no WRITE has been submitted for."""
    in_flight: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    written: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    tail_bytes: int = 0
    writes: int = 0
    first_write_s: float = 0.0
    last_submit_s: float = 0.0
    ordered_s: float = 0.0
    held: bool = False
    dead: bool = False
    failed: bool = False
    ask_quiet: str = ""
    """Who wants to hear PushQuiesced."""
    done_said: bool = False
    sent_said: bool = False


@dataclass(frozen=True)
class Speaker:
    """Who a rank is, in its messages."""

    me: str
    rank: int
    ranks: int

    def done(self, push: Push, now_s: float) -> Post:
        """All is written."""
        assert push.order is not None
        ready_s = max(push.final_s, push.ordered_s)
        done = PushDone(
            transfer_id=push.transfer_id,
            producer_id=self.me,
            consumer_id=push.order.consumer_id,
            rank=self.rank,
            ranks=self.ranks,
            ranges=push.written,
            bytes=push.bytes,
            duration_ms=round((now_s - push.first_write_s) * 1e3, 3),
            writes=push.writes,
            tail_bytes=push.tail_bytes,
            submit_ms=round(max(push.last_submit_s - ready_s, 0.0) * 1e3, 3),
            ordered_before_ready=push.ordered_s <= push.final_s,
            handoff_ms=round((now_s - push.final_s) * 1e3, 3),
        )
        return Post(push.order.consumer_id, done)

    def quiet(self, transfer_id: str, to: str, state: QuiesceState) -> Post:
        """Nothing of the transfer is in flight here, nor ever will be."""
        quiesced = PushQuiesced(
            transfer_id=transfer_id, producer_id=self.me, consumer_id=to, rank=self.rank, ranks=self.ranks, state=state
        )
        return Post(to, quiesced)

    def failure(self, push: Push, detail: str) -> Post:
        """This rank cannot write its part."""
        to = push.order.consumer_id if push.order else MATCHER
        failed = PushFailed(
            transfer_id=push.transfer_id,
            producer_id=self.me,
            consumer_id=to,
            rank=self.rank,
            reason="write_failed",
            detail=detail,
        )
        return Post(to, failed)


def both_prompts(order: PushOrdered, terms: Terms) -> str:
    """The registered prompt and the computed one, in numbers that tell nothing of their text."""
    return (
        f"{order.token_count} tokens ({order.prompt_digest}) were registered, "
        f"{terms.token_count} ({terms.prompt_digest}) are computed"
    )
