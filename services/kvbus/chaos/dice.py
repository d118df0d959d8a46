"""Draws that are a pure function of a seed and of nothing else. Pure."""

from collections.abc import MutableSequence, Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")

_FINE = 1 << 32


class Dice:
    """Two of the same `seed` and `name` give the same draws, on every machine and in every version of Python."""

    def __init__(self, seed: int, name: str) -> None:
        self._key = f"{seed}/{name}"
        self._count = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit` - 1."""
        self._count += 1
        drawn = blake2b(f"{self._key}/{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") % limit

    def between(self, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        return low + (high - low) * self.below(_FINE) / _FINE

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
