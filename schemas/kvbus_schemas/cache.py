"""Cache plane: vLLM's KV events, bridged to the bus. Block hashes are vLLM's own and reveal no tokens."""

from typing import ClassVar

from kvbus_schemas.envelope import Message, Plane


class _CacheMessage(Message, frozen=True, kw_only=True):
    PLANE: ClassVar[Plane] = "cache"

    engine_id: str
    event_seq: int
    """vLLM's own sequence number of the batch that the event came in."""

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
    """The engine's prefix cache is empty."""
