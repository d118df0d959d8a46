"""Transfer plane: moving one request's KV from a producer engine to a consumer engine.

In a push the prefill is the producer; in a reuse the decode is. Lists of block ids have one list per KV cache
group. Block positions count from the first block of the prompt, so that either side can slice by position.
Durations are what remained at the moment of sending, in seconds.
"""

from typing import ClassVar, Literal

from kvbus_schemas.envelope import Message, Plane

UnavailableReason = Literal["aborted", "failed", "expired", "unknown", "refused", "producer_gone", "not_needed"]
Outcome = Literal["completed", "failed", "cancelled", "expired"]
QuiesceState = Literal["never_started", "finished", "failed"]


class _TransferMessage(Message, frozen=True, kw_only=True):
    PLANE: ClassVar[Plane] = "transfer"

    transfer_id: str

    @property
    def key(self) -> str:
        return self.transfer_id


class BlocksRegistered(_TransferMessage, frozen=True, kw_only=True):
    """A consumer holds these blocks, empty, for this transfer and nothing else."""

    producer_id: str
    producer_incarnation: str = ""
    producer_lease: int = 0
    """`lease` of the producer's card as the consumer saw it."""
    consumer_id: str
    consumer_incarnation: str
    block_ids: list[list[int]]
    first_block: int
    """Position, in the prompt, of the first block of every list; what is before it the consumer has already."""
    token_count: int
    """Prompt tokens up to which KV is wanted; the last block may be partly filled."""
    prompt_digest: str
    """Digest of those tokens under the transfer id: equal on both sides or the transfer is refused."""
    block_size: int
    compat_hash: str = ""
    consumer_tp_size: int = 1
    lease_s: float
    """Seconds for which the consumer still waits."""
    request_id: str = ""
    reuse: bool = False
    """True: the producer is a decode engine that kept a conversation's blocks."""
    offer_id: str = ""
    """With `reuse`: which of the producer's offers."""


class BlocksReady(_TransferMessage, frozen=True, kw_only=True):
    """A producer has computed all blocks of this transfer and holds them until it is closed."""

    producer_id: str
    consumer_id: str = ""
    block_ids: list[list[int]]
    token_count: int
    prompt_digest: str
    lease_s: float
    computed_ms: float = 0.0
    """From the request's arrival in the engine to its last forward pass, in milliseconds."""
    cached_tokens: int = 0
    """Tokens that came out of the producer's own prefix cache."""
    block_size: int = 0


class BlocksUnavailable(_TransferMessage, frozen=True, kw_only=True):
    """These blocks will never come (again). Sent at once, so that nobody waits for a time-out to learn it."""

    producer_id: str
    reason: UnavailableReason
    detail: str = ""


class PushOrdered(_TransferMessage, frozen=True, kw_only=True):
    """The matcher has checked a registration: producer, write these blocks as you finish them."""

    producer_id: str
    producer_incarnation: str = ""
    producer_lease: int = 0
    """The registration's. A producer whose card has lapsed since refuses the order: its consumer may have freed."""
    consumer_id: str
    consumer_incarnation: str
    block_ids: list[list[int]]
    first_block: int
    token_count: int
    prompt_digest: str
    consumer_tp_size: int = 1
    lease_s: float
    reuse: bool = False
    offer_id: str = ""


class PushDone(_TransferMessage, frozen=True, kw_only=True):
    """One producer rank has written its part; NIXL has said that the WRITEs are done."""

    producer_id: str
    consumer_id: str
    rank: int
    """Tensor parallel rank of the producer."""
    ranks: int
    """Tensor parallel size of the producer."""
    ranges: list[tuple[int, int]]
    """What was written: (position of the first block, number of blocks)."""
    bytes: int
    duration_ms: float
    """From the first WRITE submitted to the last one done."""
    writes: int = 1
    tail_bytes: int = 0
    """Bytes that were still unwritten when the last forward pass had ended."""
    submit_ms: float = 0.0
    """From the end of the last forward pass (or the order, if later) to the last WRITE submitted."""
    ordered_before_ready: bool = True
    handoff_ms: float = 0.0
    """From the end of the last forward pass to the last WRITE done: what a decode has waited for after prefill."""


class PushFailed(_TransferMessage, frozen=True, kw_only=True):
    """One producer rank could not write its part. The consumer ends the transfer."""

    producer_id: str
    consumer_id: str
    rank: int
    reason: str
    detail: str = ""


class TransferClosed(_TransferMessage, frozen=True, kw_only=True):
    """The consumer's last word: exactly one per transfer. The producer may free."""

    producer_id: str
    consumer_id: str
    outcome: Outcome
    reason: str = ""
    waited_ms: float = 0.0
    """From the registration to this word."""
    start_ms: float = 0.0
    """From the arrival of the last completion notice to the request being ready to run."""


class CancelOrdered(_TransferMessage, frozen=True, kw_only=True):
    """Stop this transfer if you can. A producer answers with PushQuiesced from each rank; a consumer closes it."""

    reason: str
    consumer_id: str = ""
    """Who wants to hear PushQuiesced; empty when nobody waits for it."""


class PushQuiesced(_TransferMessage, frozen=True, kw_only=True):
    """From now on no WRITE of this rank touches the transfer's blocks: the consumer may free or overwrite them."""

    producer_id: str
    consumer_id: str
    rank: int
    ranks: int
    state: QuiesceState
