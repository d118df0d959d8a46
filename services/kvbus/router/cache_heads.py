"""What beginnings of prompts became in the engines: from a mark of the text to the name of a block. Pure.

An engine names some blocks of each prompt (`PromptHashed`). A mark's last full block is found by its share of the
prompt, so it may be off by a block or two where text is uneven; a name that two prompts with the same mark agree on is
proved and stays. Bounded: who was learned longest ago goes first, and every use of a beginning is learned again.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from kvbus.router.cache_prompt import Prompt
from kvbus_schemas import PromptHashed, PromptMapped

RATIO_WEIGHT = 0.1
"""Of the newest prompt in the average of bytes that a token stands for."""


class Head(NamedTuple):
    """A beginning: the name of its last full block (empty if it has none) and the tokens up to there."""

    name: bytes
    tokens: int


class Heads:
    """At most `marks_max` marks."""

    def __init__(self, marks_max: int) -> None:
        self.marks_max = marks_max
        self._heads: dict[bytes, Head] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def known(self, prompt: Prompt) -> list[Head]:
        """The beginnings of this prompt that are known, the shortest first."""
        found = []
        heads = self._heads
        for mark, _ in prompt.marks():
            head = heads.get(mark)
            if head is None:
                break
            found.append(head)
        return found

    def learn(self, prompt: Prompt, hashed: PromptHashed) -> PromptMapped | None:
        """An engine has got this prompt. Returns what is new, for the other routers."""
        if not prompt.size or len(hashed.ends) != len(hashed.block_hashes) or hashed.block_size < 1:
            return None
        named = dict(zip(hashed.ends, hashed.block_hashes, strict=True))
        new: list[tuple[bytes, Head]] = []
        for mark, end in prompt.marks():
            known = self._heads.pop(mark, None)
            head = known if known is not None and self._is_proved(known, named, hashed) else None
            if head is None:
                head = _head_at(prompt.tokens_at(end, hashed.token_count), hashed)
                new.append((mark, head))
            self._heads[mark] = head
        self._trim()
        if not new:
            return None
        return PromptMapped(
            transfer_id=hashed.transfer_id,
            marks=[mark for mark, _ in new],
            block_hashes=[head.name for _, head in new],
            tokens=[head.tokens for _, head in new],
        )

    def told(self, mapped: PromptMapped) -> None:
        """Another router has learned something, or this one before its restart."""
        for mark, name, tokens in zip(mapped.marks, mapped.block_hashes, mapped.tokens, strict=False):
            self._heads.pop(mark, None)
            self._heads[mark] = Head(name, tokens)
        self._trim()

    def _is_proved(self, known: Head, named: dict[int, bytes], hashed: PromptHashed) -> bool:
        return bool(known.name) and named.get(known.tokens // hashed.block_size) == known.name

    def _trim(self) -> None:
        surplus = len(self._heads) - self.marks_max
        for mark in [mark for mark, _ in zip(self._heads, range(surplus), strict=False)]:
            del self._heads[mark]


class TokenSize:
    """Bytes that a token stands for, learned from what engines say of prompts."""

    def __init__(self, start: float) -> None:
        self.bytes = start
        self._prompts = 0

    def learn(self, size: int, token_count: int) -> None:
        """A prompt of so many bytes has become so many tokens."""
        if size and token_count > 0:
            self._prompts += 1
            self.bytes += max(RATIO_WEIGHT, 1 / self._prompts) * (size / token_count - self.bytes)

    def tokens(self, size: int) -> int:
        """Of a prompt of so many bytes, at a guess."""
        return max(1, int(size / self.bytes))


def _head_at(tokens: int, hashed: PromptHashed) -> Head:
    """The last named block that ends within the first `tokens` tokens."""
    at = bisect_right(hashed.ends, tokens // hashed.block_size) - 1
    return Head(b"", 0) if at < 0 else Head(hashed.block_hashes[at], hashed.ends[at] * hashed.block_size)


def hits_first(heads: Iterable[Head]) -> list[Head]:
    """Those with a block, the longest first."""
    return [head for head in reversed(list(heads)) if head.name]
