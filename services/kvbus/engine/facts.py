"""What the scheduler and the ranks of one engine tell each other, in step metadata: plain data, no vLLM.

Scheduler and ranks are processes of their own. A step carries one `StepOrders` from the scheduler to every rank;
what a rank has to say travels back in vLLM's transfer results.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

SERVED = "reuse:"
"""Prefix of the names under which ranks serve a kept conversation; vLLM has no request of such a name."""
MATCHER = "matcher"
"""The receiver of what consumers and producers tell the matcher."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a producer request has got: after this step's forward pass its first `ready_blocks` are final."""

    transfer_id: str
    request_id: str
    block_ids: tuple[int, ...]
    """Blocks from position `first` on, as vLLM allocated them since the last Progress."""
    first: int
    ready_blocks: int
    final: bool
    """The whole prompt is computed; the last block may be partly filled."""
    restarted: bool = False
    """The request was preempted: `block_ids` replace the whole list."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a producer rank checks an order against."""

    transfer_id: str
    request_id: str
    token_count: int
    prompt_digest: str


@dataclass(frozen=True, slots=True)
class Expect:
    """A consumer request is parked until these blocks have landed from each of these producer ranks."""

    transfer_id: str
    request_id: str
    first_block: int
    block_count: int
    producer_tp: int


@dataclass(slots=True)
class StepOrders:
    """Everything that one step tells the ranks."""

    admitted: list[Terms] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Transfers whose source blocks this step takes away: no WRITE may still read them."""
    held: list[str] = field(default_factory=list)
    """Transfers whose request has finished: report it as sent once nothing more is to be written."""
    released: list[str] = field(default_factory=list)
    """Transfers that are over: write no more, and report the request as sent once quiet."""
    dropped: list[str] = field(default_factory=list)
    """Transfers whose request has ended before anything of it was computed: nothing is to be reported."""
    expected: list[Expect] = field(default_factory=list)
    concluded: dict[str, bool] = field(default_factory=dict)
    """Parked requests (by request id) to give back now, whatever has landed; True: as failed."""
    hinted: list[str] = field(default_factory=list)
    """Transfers whose every PushDone is in: the data should be there any moment."""

    def __bool__(self) -> bool:
        return any((self.admitted, self.progress, self.preempted, self.held, self.released, self.dropped,
                    self.expected, self.concluded, self.hinted))  # fmt: skip


def prompt_digest(transfer_id: str, token_ids: list[int], token_count: int) -> str:
    """Digest of the first `token_count` tokens under the transfer id: 16 hexadecimal digits.

    Equal on both sides of a transfer; different between transfers, so it tells an onlooker nothing.
    """
    tokens = array("I", token_ids[:token_count]).tobytes()
    return blake2b(tokens, digest_size=8, key=transfer_id.encode()[:64]).hexdigest()


def blocks_for(token_count: int, block_size: int) -> int:
    """How many blocks hold `token_count` tokens."""
    return -(-token_count // block_size)


def producer_ranks_of(consumer_rank: int, consumer_tp: int, producer_tp: int) -> frozenset[int]:
    """Which tensor parallel ranks of the producer write into one rank of the consumer (heads are split evenly)."""
    if producer_tp <= consumer_tp:
        return frozenset({consumer_rank * producer_tp // consumer_tp})
    share = producer_tp // consumer_tp
    return frozenset(range(consumer_rank * share, (consumer_rank + 1) * share))


def landing_note(transfer_id: str, rank: int, first: int, count: int) -> str:
    """The text that rides on a WRITE as its NIXL notification."""
    return f"kvbus|{transfer_id}|{rank}|{first}|{count}"


def read_landing_note(note: bytes) -> tuple[str, int, int, int] | None:
    """(transfer_id, producer rank, first block, number of blocks), or None for a note that is not ours.

    vLLM's data plane appends `:<producer world size>` to every note.
    """
    try:
        kind, transfer_id, rank, first, count = note.decode("ascii").rsplit(":", 1)[0].split("|")
        return (transfer_id, int(rank), int(first), int(count)) if kind == "kvbus" else None
    except ValueError:
        return None
