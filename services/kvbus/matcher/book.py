"""The matcher's books: open transfers, tombstones, counters and contradictions, all of them bounded."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus.matcher.tombstones import Delivery, Tombstones
from kvbus_schemas import BlocksReady, BlocksRegistered, Message, Post
from kvbus_schemas.transfer import UnavailableReason

STORY_MAX = 16
"""Messages of one transfer that are kept for its story."""
CONTRADICTIONS_MAX = 100
"""Contradictions that wait to be taken by the shell; the oldest is forgotten first."""


class Contradiction(NamedTuple):
    """Two messages about one transfer cannot both be true; `story` is what came before, with the times."""

    transfer_id: str
    text: str
    story: list[tuple[float, Message]]


@dataclass(slots=True)
class Transfer:
    """A transfer that is not over."""

    expires_s: float
    registration: BlocksRegistered | None = None
    delivery: Delivery | None = None
    contradicted: Delivery | None = None
    """The other registration that was refused last."""
    ready: BlocksReady | None = None
    held_until_s: float = 0.0
    ordered_to: str | None = None
    """The producer's incarnation that the order went to; None while there is no order."""
    story: list[tuple[float, Message]] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Registered, and waiting for an engine's card."""
        return self.registration is not None and self.ordered_to is None


class Book:
    """What is open and what is over. A key is never both."""

    def __init__(self, transfers_max: int, tombstone_s: float, tombstones_max: int) -> None:
        self.transfers_max = transfers_max
        self.now_s = 0.0
        self.open: dict[str, Transfer] = {}
        self.over = Tombstones(tombstone_s, tombstones_max)
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.contradictions: deque[Contradiction] = deque(maxlen=CONTRADICTIONS_MAX)

    def advance(self, now_s: float | None) -> None:
        """Time never goes back; None leaves it where it is."""
        self.now_s = max(self.now_s, now_s or 0.0)

    def admit(self, key: str, expires_s: float) -> Transfer | None:
        """The open transfer of that key, a new one if there is none; None if there is no room for it."""
        transfer = self.open.get(key)
        if transfer is None and len(self.open) < self.transfers_max:
            transfer = self.open[key] = Transfer(expires_s)
        return transfer

    def finish(self, key: str, reason: UnavailableReason, detail: str) -> None:
        """The transfer is over, known or not."""
        self.open.pop(key, None)
        self.over.put(key, reason, detail, self.now_s)

    def note(self, transfer: Transfer, message: Message) -> None:
        """Add to the transfer's story."""
        if len(transfer.story) < STORY_MAX:
            transfer.story.append((self.now_s, message))

    def contradicts(self, transfer: Transfer, message: Message, text: str) -> None:
        """Record that `message` cannot be true beside what the transfer's story says."""
        self.counters["contradictions"] += 1
        self.contradictions.append(Contradiction(message.key, text, [*transfer.story, (self.now_s, message)]))

    def drop(self) -> list[Post]:
        """Count a message that changes nothing because it is unknown, stale or a stranger's. Nothing to post."""
        self.counters["dropped"] += 1
        return []
