"""A prompt by its beginnings: digests of growing parts of what the client sent, equal where two prompts begin alike.

The router has no tokenizer. It digests the bytes of the prompt as they stand in the request, behind all else that goes
into the prompt before them (model, tools, template, salt), and learns from engines what tokens they became. Digests are
chained and made under the routers' secret, lazily: a look-up stops at the first beginning that nobody knows. Pure.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256

import msgspec

MARK_BYTES = 12
FIRST_MARK_BYTES = 256
"""Beginnings are so long, and longer by as much up to DENSE_BYTES; from there on by an eighth of the power of two below
them, so that a prompt of 100k tokens has some 75."""
DENSE_BYTES = 4096
SHARE_BITS = 3
PROMPT_BYTES_MAX = 1024 * 1024
"""What of a prompt is looked at."""
BEFORE = ("tools", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "cache_salt")
"""Members of a body that change a prompt from its beginning on."""
TOKEN_BYTES = 4.0
"""Bytes of text that a token stands for until engines have told."""
ID_BYTES = 5.5
"""Bytes of JSON that a token id takes."""


class Prompt:
    """One request's prompt. `text` is the JSON of its prompt or messages."""

    def __init__(self, text: bytes, before: bytes, secret: bytes) -> None:
        self.text = text
        self.is_ids = text[:1] == b"[" and text[1:64].lstrip()[:1].isdigit()
        """Whether the client sent token ids."""
        self._marks: list[tuple[bytes, int]] = []
        self._last = sha256(b"\0".join((secret, b"ids" if self.is_ids else b"text", before))).digest()
        self._at = 0

    @property
    def size(self) -> int:
        """Bytes of the prompt."""
        return len(self.text)

    @property
    def head(self) -> str:
        """The first mark, for whoever wants prompts that begin alike in one place; of a shorter one, all of it."""
        mark = next(self.marks(), None)
        return mark[0].hex() if mark else sha256(self._last + self.text).digest()[:MARK_BYTES].hex()

    def marks(self) -> Iterator[tuple[bytes, int]]:
        """(digest, bytes) of each beginning, the shortest first."""
        number = 0
        while True:
            if number == len(self._marks) and not self._next():
                return
            yield self._marks[number]
            number += 1

    def tokens_at(self, end: int, token_count: int) -> int:
        """How many of its tokens the first `end` bytes are: exact for ids, else by their share of the bytes."""
        if self.is_ids:
            return self.text.count(b",", 0, end)
        return int(token_count * (end / self.size))

    def _next(self) -> bool:
        end = self._at + step_at(self._at)
        if end > min(self.size, PROMPT_BYTES_MAX):
            return False
        self._last = sha256(self._last + self.text[self._at : end]).digest()
        self._marks.append((self._last[:MARK_BYTES], end))
        self._at = end
        return True


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one request's prompt before it is dispatched."""

    prompt: Prompt | None = None
    tokens: int = 0
    """Its length, at a guess; 0 where the request has no prompt to speak of."""
    hits: Mapping[str, int] = {}
    """Tokens that each engine holds."""
    head: str = ""

    def work(self, engine_id: str) -> int:
        """Tokens that the engine has to compute for it, at a guess."""
        return max(1, self.tokens - self.hits.get(engine_id, 0))


NOTHING_READ = Reading()


def step_at(position: int) -> int:
    """How far the mark after `position` is from it, in bytes."""
    if position < DENSE_BYTES:
        return FIRST_MARK_BYTES
    return 1 << (position.bit_length() - 1 - SHARE_BITS)


def prompt_of(members: Mapping[str, msgspec.Raw], model: str, secret: bytes) -> Prompt | None:
    """The prompt in a body; None where it has none, or several."""
    text = members.get("messages") or members.get("prompt")
    if text is None or not secret:
        return None
    before = [model.encode("utf-8", "surrogatepass")]
    before += [bytes(members[name]) for name in BEFORE if name in members]
    return Prompt(bytes(text), b"\0".join(before), secret)
