"""What a matcher remembers of transfers that are over, so that a late or repeated message opens nothing again."""

from dataclasses import dataclass

from kvbus_schemas import BlocksRegistered
from kvbus_schemas.transfer import UnavailableReason

Delivery = tuple[str, str, int]
"""Source, incarnation and sequence number: what a redelivered message shares with its first delivery."""


def delivery_of(registration: BlocksRegistered) -> Delivery:
    """Which publication this is; a repeated fact in a new publication asks for a repeated answer."""
    return (registration.source or registration.consumer_id, registration.incarnation, registration.seq)


@dataclass(slots=True)
class Tombstone:
    """A transfer that is over, and what a registration that still comes is told."""

    reason: UnavailableReason
    detail: str
    until_s: float
    closed_by: str = ""
    """The consumer that has spoken its last word; it needs no answer any more."""
    answered: Delivery | None = None
    """The registration that was answered last."""


class Tombstones:
    """Tombstones by transfer key, oldest first: at most `count_max`, each for `keep_s` seconds."""

    def __init__(self, keep_s: float, count_max: int) -> None:
        self._keep_s = keep_s
        self._count_max = count_max
        self._by_key: dict[str, Tombstone] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def get(self, key: str) -> Tombstone | None:
        return self._by_key.get(key)

    def put(self, key: str, reason: UnavailableReason, detail: str, now_s: float) -> Tombstone:
        """The key's tombstone, a new one if it has none: the first reason stands."""
        tombstone = self._by_key.get(key)
        if tombstone is None:
            tombstone = self._by_key[key] = Tombstone(reason, detail, now_s + self._keep_s)
            if len(self._by_key) > self._count_max:
                del self._by_key[next(iter(self._by_key))]
        return tombstone

    def drop_old(self, now_s: float) -> None:
        """Forget what is older than `keep_s`."""
        while self._by_key:
            key = next(iter(self._by_key))
            if self._by_key[key].until_s > now_s:
                return
            del self._by_key[key]
