"""The language of light engines: one token per byte, and a next token that depends on every token before it. Pure."""

from array import array
from hashlib import blake2b
from typing import Any

EOS = 2
FIRST_BYTE = 3
"""Token of byte 0; below it are unknown, beginning and end, as in the seeded test models."""
TOKEN_MAX = 2**31 - 1
LETTERS = b"etaoinshrdlucmfwypvbgk      ."
TOKEN_BYTES = 4
_SPREAD = 1 << 20


def tokens_of(text: str) -> list[int]:
    """The tokens of a text."""
    return [FIRST_BYTE + byte for byte in text.encode("utf-8", "surrogatepass")]


def text_of(tokens: list[int]) -> str:
    """The text of tokens; what stands for no byte is left out."""
    return bytes(t - FIRST_BYTE for t in tokens if 0 <= t - FIRST_BYTE < 256).decode("utf-8", "replace")  # noqa: PLR2004


def packed(tokens: list[int]) -> bytes:
    """Tokens as a block holds them: four bytes each."""
    return array("I", tokens).tobytes()


def next_token(context: bytes, *, eos_every: int) -> int:
    """The token that follows `context` (packed tokens): a letter, or the end once in `eos_every` times."""
    number = int.from_bytes(blake2b(context, digest_size=8).digest(), "little")
    if eos_every and number % _SPREAD < _SPREAD // eos_every:
        return EOS
    return FIRST_BYTE + LETTERS[number // _SPREAD % len(LETTERS)]


def chat_prompt(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """The template of the seeded test models."""
    said = "".join(f"{message.get('role', '')}: {content_of(message)}\n" for message in messages)
    return said + ("assistant: " if add_generation_prompt else "")


def content_of(message: dict[str, Any]) -> str:
    """A message's text: a string, or the text parts of a list."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
