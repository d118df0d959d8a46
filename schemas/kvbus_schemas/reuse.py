"""Reuse plane: the KV that a conversation leaves behind on a decode engine, and who takes it back."""

from typing import ClassVar, Literal

from kvbus_schemas.envelope import Message, Plane
from kvbus_schemas.ticket import ReuseGrant

MissReason = Literal[
    "new", "expired", "claimed", "withdrawn", "engine_gone", "too_short", "incompatible", "unavailable", "disabled"
]


class _ReuseMessage(Message, frozen=True, kw_only=True):
    PLANE: ClassVar[Plane] = "reuse"

    conversation: str
    """Keyed hash of tenant and conversation id: 32 hexadecimal digits."""

    @property
    def key(self) -> str:
        return self.conversation


class ReuseOffered(_ReuseMessage, frozen=True, kw_only=True):
    """A decode engine keeps the KV of a finished turn."""

    offer_id: str
    offer_seq: int
    """Counts the engine's offers; tells "not yet known" from "gone"."""
    engine_id: str
    block_count: int
    block_size: int
    token_count: int
    """Tokens whose KV is held: prompt and answer, less the last sampled token, which has none."""
    chain: list[bytes]
    """Digest chain under the conversation's key: one link per full block, and one for the tail."""
    remaining_s: float
    compat_hash: str = ""


class ReuseAsked(_ReuseMessage, frozen=True, kw_only=True):
    """A router asks whether a conversation has KV somewhere. `claim` takes the offer, at most once."""

    request_id: str = ""
    claim: bool = True
    compat_hash: str = ""
    """Of the prefills that could take the KV, if they agree: what does not fit is a miss `incompatible`, and stays."""


class ReuseAnswered(_ReuseMessage, frozen=True, kw_only=True):
    """The grant, or why there is none."""

    grant: ReuseGrant | None = None
    miss: MissReason | None = None
    age_s: float = 0.0


class ReuseReleased(_ReuseMessage, frozen=True, kw_only=True):
    """Prefill does not need (the rest of) the offer that was claimed for it: let go."""

    offer_id: str
    transfer_id: str
    reason: str


class ReuseWithdrawn(_ReuseMessage, frozen=True, kw_only=True):
    """The engine no longer holds the offer."""

    offer_id: str
    engine_id: str
    reason: Literal["expired", "evicted", "taken", "released", "restarted"]
    blocks: int = 0
