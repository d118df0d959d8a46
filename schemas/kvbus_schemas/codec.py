"""Bytes to messages and back: MessagePack maps, tagged by type, with a limit on size."""

import msgspec

from kvbus_schemas.cache import BlocksRemoved, BlocksStored, CacheAsked, CacheCleared, PromptHashed, PromptMapped
from kvbus_schemas.envelope import Message
from kvbus_schemas.presence import DrainOrdered, EngineCard, LoadReported
from kvbus_schemas.reuse import ReuseAnswered, ReuseAsked, ReuseOffered, ReuseReleased, ReuseWithdrawn
from kvbus_schemas.route import RequestServed, RouteAnswered, RouteAsked, RouteDecided
from kvbus_schemas.transfer import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    PushDone,
    PushFailed,
    PushOrdered,
    PushQuiesced,
    TransferClosed,
)

MESSAGE_BYTES_MAX = 256 * 1024

KINDS: tuple[type[Message], ...] = (
    EngineCard,
    LoadReported,
    DrainOrdered,
    RouteDecided,
    RequestServed,
    RouteAsked,
    RouteAnswered,
    BlocksRegistered,
    BlocksReady,
    BlocksUnavailable,
    PushOrdered,
    PushDone,
    PushFailed,
    TransferClosed,
    CancelOrdered,
    PushQuiesced,
    ReuseOffered,
    ReuseAsked,
    ReuseAnswered,
    ReuseReleased,
    ReuseWithdrawn,
    BlocksStored,
    BlocksRemoved,
    CacheCleared,
    CacheAsked,
    PromptHashed,
    PromptMapped,
)
"""Every message of the bus."""

AnyMessage = (
    EngineCard
    | LoadReported
    | DrainOrdered
    | RouteDecided
    | RequestServed
    | RouteAsked
    | RouteAnswered
    | BlocksRegistered
    | BlocksReady
    | BlocksUnavailable
    | PushOrdered
    | PushDone
    | PushFailed
    | TransferClosed
    | CancelOrdered
    | PushQuiesced
    | ReuseOffered
    | ReuseAsked
    | ReuseAnswered
    | ReuseReleased
    | ReuseWithdrawn
    | BlocksStored
    | BlocksRemoved
    | CacheCleared
    | CacheAsked
    | PromptHashed
    | PromptMapped
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class MessageTooLargeError(ValueError):
    """Our own message is over the limit: a fault at the sender."""

    def __init__(self, kind: str, size_bytes: int) -> None:
        super().__init__(
            f"a {kind} of {size_bytes} bytes is over the bus's limit of {MESSAGE_BYTES_MAX}: "
            "send fewer blocks or engines at once"
        )
        self.kind = kind
        self.size_bytes = size_bytes


class UndecodableError(ValueError):
    """Bytes of somebody else's that are no message of ours."""


def encode(message: Message) -> bytes:
    """The message's bytes. Raises MessageTooLargeError over MESSAGE_BYTES_MAX."""
    data = _encoder.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageTooLargeError(type(message).__name__, len(data))
    return data


def decode(data: bytes) -> AnyMessage:
    """The message in `data`. Raises UndecodableError when there is none; unknown fields are ignored."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableError(str(error)) from error
