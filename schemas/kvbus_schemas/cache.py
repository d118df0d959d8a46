"""Cache plane: what engines hold in their prefix caches (vLLM's KV events), and how a router knows a prompt there.

A block goes by a name of 8 bytes: vLLM's own hash of it and of all before it, hashed once more under a key that the
engines share. Names reveal no tokens, and are equal on engines with the same key and vLLM's default hashing.
"""

from typing import ClassVar

from kvbus_schemas.envelope import Message, Plane


class _CacheMessage(Message, frozen=True, kw_only=True):
    PLANE: ClassVar[Plane] = "cache"

    engine_id: str
    event_seq: int
    """Counts the engine's BlocksStored, BlocksRemoved and CacheCleared from 1, per incarnation: a gap is a loss."""

    @property
    def key(self) -> str:
        return self.engine_id


class BlocksStored(_CacheMessage, frozen=True, kw_only=True):
    """Blocks entered the engine's prefix cache, in prompt order. A repeat changes nothing."""

    block_hashes: list[bytes]
    parent_hash: bytes | None = None
    block_size: int


class BlocksRemoved(_CacheMessage, frozen=True, kw_only=True):
    """Blocks left the engine's prefix cache."""

    block_hashes: list[bytes]


class CacheCleared(_CacheMessage, frozen=True, kw_only=True):
    """The engine's prefix cache is empty; or, with `restates`, the engine begins to say again all that it holds."""

    restates: bool = False
    """True: nothing was cleared. The BlocksStored that follow name the whole cache; who has missed something starts
    from nothing here, and who has not may ignore it."""
    block_count: int = 0
    """With `restates`: how many blocks follow."""


class CacheAsked(Message, frozen=True, kw_only=True):
    """A router asks an engine to restate its cache, since it came late or has missed something."""

    PLANE: ClassVar[Plane] = "cache"

    engine_id: str
    reason: str = ""

    @property
    def key(self) -> str:
        return self.engine_id


class PromptHashed(Message, frozen=True, kw_only=True):
    """An engine has got a prompt, and says under which names its blocks are, or will be, in prefix caches."""

    PLANE: ClassVar[Plane] = "cache"

    engine_id: str
    transfer_id: str
    token_count: int
    block_size: int
    ends: list[int]
    """Positions in the prompt, in blocks, growing: close together at first, then at a sixteenth of their distance."""
    block_hashes: list[bytes]
    """For each of `ends` the name of the block that ends there."""

    @property
    def key(self) -> str:
        return self.transfer_id


class PromptMapped(Message, frozen=True, kw_only=True):
    """A router has learned which blocks a prompt's text becomes, for other routers and for its own restart."""

    PLANE: ClassVar[Plane] = "cache"

    transfer_id: str
    marks: list[bytes]
    """Digests of beginnings of the prompt, each longer than the one before, under the routers' shared secret."""
    block_hashes: list[bytes]
    """For each mark the name of the last block of that beginning; empty where it is less than a block."""
    tokens: list[int]
    """For each mark how many tokens that is."""

    @property
    def key(self) -> str:
        return self.transfer_id
