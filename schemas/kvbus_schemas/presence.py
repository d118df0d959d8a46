"""Presence plane: which engines live, what they are and how busy they are."""

from typing import ClassVar, Literal

import msgspec

from kvbus_schemas.envelope import Message, Plane

Role = Literal["prefill", "decode"]


class EngineCard(Message, frozen=True, kw_only=True):
    """An engine says who it is. Kept in the bucket `kvbus_engines` under its engine_id, renewed every 2 s, gone
    6 s after the last renewal. A card with another incarnation replaces every promise of the one before it."""

    PLANE: ClassVar[Plane] = "presence"

    engine_id: str
    role: Role
    model: str
    http_url: str
    """Where the engine's OpenAI-compatible server listens, without a trailing slash."""
    block_size: int
    """Tokens in a KV block."""
    num_blocks: int
    tp_size: int = 1
    pp_size: int = 1
    kv_layout: str = ""
    compat_hash: str = ""
    """Equal on two engines whose KV blocks mean the same bytes (model, dtype, attention backend, versions)."""
    vllm_version: str = ""
    kvbus_version: str = ""
    max_model_len: int = 0
    capabilities: list[str] = []
    """What the engine can do: `push`, `progressive`, `reuse`; `cache`: it says what its prefix cache holds."""
    draining: bool = False
    """True while the engine finishes what it has and wants no new requests."""
    agent_metadata: dict[str, bytes] = {}
    """NIXL agent metadata by rank, keyed `"<pp_rank>.<tp_rank>"`; about 1.4 KB a rank."""
    lease: int = 0
    """Grows when the card had lapsed and came back: orders that were given under an earlier lease are void."""
    put_monotonic_s: float = 0.0
    """When this card was sent, by the monotonic clock of the engine's host; means nothing on another host."""
    boot_id: str = ""
    """Which boot of which host that clock belongs to."""

    @property
    def key(self) -> str:
        return self.engine_id


class LoadReported(Message, frozen=True, kw_only=True):
    """How busy an engine is. Sent when it changed, at most twice a second, and at least every 2 s."""

    PLANE: ClassVar[Plane] = "presence"

    engine_id: str
    running: int
    """Requests in the running batch."""
    waiting: int
    """Requests queued or parked for KV."""
    free_blocks: int
    total_blocks: int
    tokens_in_flight: int = 0
    """Prompt and output tokens of all unfinished requests."""
    held_blocks: int = 0
    """Blocks kept for conversations (reuse)."""

    @property
    def key(self) -> str:
        return self.engine_id


class DrainOrdered(Message, frozen=True, kw_only=True):
    """An engine is asked to take no new requests and to finish what it has; its card then says `draining`."""

    PLANE: ClassVar[Plane] = "presence"

    engine_id: str
    reason: str = ""

    @property
    def key(self) -> str:
        return self.engine_id


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Bytes that a process could not take: where they came in, why, how many. Never the bytes themselves."""

    source: str
    subject: str
    reason: str
    size_bytes: int
