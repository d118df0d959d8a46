"""The wire of kvbus: every message, where it is published, and its bytes. Needs msgspec and nothing else."""

from kvbus_schemas.cache import BlocksRemoved, BlocksStored, CacheCleared
from kvbus_schemas.codec import (
    KINDS,
    MESSAGE_BYTES_MAX,
    AnyMessage,
    MessageTooLargeError,
    UndecodableError,
    decode,
    encode,
)
from kvbus_schemas.envelope import EVERYONE, Message, Post
from kvbus_schemas.presence import DeadLetter, DrainOrdered, EngineCard, LoadReported, Role
from kvbus_schemas.reuse import ReuseAnswered, ReuseAsked, ReuseOffered, ReuseReleased, ReuseWithdrawn
from kvbus_schemas.route import Candidate, EngineView, RequestServed, RouteAnswered, RouteAsked, RouteDecided
from kvbus_schemas.ticket import Mode, ReuseGrant, Ticket, TicketError, TicketRole, ticket_from_params
from kvbus_schemas.transfer import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    Outcome,
    PushDone,
    PushFailed,
    PushOrdered,
    PushQuiesced,
    TransferClosed,
)

__all__ = [
    "EVERYONE",
    "KINDS",
    "MESSAGE_BYTES_MAX",
    "AnyMessage",
    "BlocksReady",
    "BlocksRegistered",
    "BlocksRemoved",
    "BlocksStored",
    "BlocksUnavailable",
    "CacheCleared",
    "CancelOrdered",
    "Candidate",
    "DeadLetter",
    "DrainOrdered",
    "EngineCard",
    "EngineView",
    "LoadReported",
    "Message",
    "MessageTooLargeError",
    "Mode",
    "Outcome",
    "Post",
    "PushDone",
    "PushFailed",
    "PushOrdered",
    "PushQuiesced",
    "RequestServed",
    "ReuseAnswered",
    "ReuseAsked",
    "ReuseGrant",
    "ReuseOffered",
    "ReuseReleased",
    "ReuseWithdrawn",
    "Role",
    "RouteAnswered",
    "RouteAsked",
    "RouteDecided",
    "Ticket",
    "TicketError",
    "TicketRole",
    "TransferClosed",
    "UndecodableError",
    "decode",
    "encode",
    "ticket_from_params",
]
