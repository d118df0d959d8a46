"""What each role may say and hear, as NATS permissions. Pure.

Theory of operation. NATS checks subjects, and the subject grammar names the sender in its fifth token. So a process
speaks only in its own name, only the kinds of message that its role has to say, writes only its own keys, and hears
only what is for it. Two things go beyond subjects, because JetStream answers to whatever reply subject it is given:

- Only the operator may make or change streams: a stream can republish what it stores under any subject.
- What JetStream copies carries its headers, and messages of the bus carry none: receivers refuse such a copy, live, in
  the past and in a bucket (`kvbus.bus.client`). Engines and guests cannot have anything of the trace copied.

Whoever may read the trace (matcher, reuse, router, observer) sees all of it: ids, block numbers, keyed hashes, digests.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from kvbus.bus.trace import MARK_ROOT
from kvbus.conversations_client import KEY_OF_SECRET, REUSE, SECRETS_BUCKET
from kvbus.engine.facts import MATCHER
from kvbus_schemas import (
    EVERYONE,
    BlocksReady,
    BlocksRegistered,
    BlocksRemoved,
    BlocksStored,
    BlocksUnavailable,
    CacheAsked,
    CacheCleared,
    CancelOrdered,
    DrainOrdered,
    LoadReported,
    Message,
    PromptHashed,
    PromptMapped,
    PushDone,
    PushFailed,
    PushOrdered,
    PushQuiesced,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
    TransferClosed,
    subjects,
)

Role = Literal["prefill", "decode", "matcher", "reuse", "router", "guest", "observer", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

RANKS_MAX = 64
HEARD_KEY = "reuse_heard"
"""The one key of the bucket of leases that belongs to reuse processes (`kvbus.reuse.past`)."""

_BOTH_ENGINES: tuple[type[Message], ...] = (
    LoadReported, DrainOrdered, BlocksRegistered, BlocksReady, BlocksUnavailable, TransferClosed, CancelOrdered,
    BlocksStored, BlocksRemoved, CacheCleared, PromptHashed,
)  # fmt: skip
SAYS: dict[Role, tuple[type[Message], ...]] = {
    "prefill": (*_BOTH_ENGINES, ReuseReleased),
    "decode": (*_BOTH_ENGINES, ReuseOffered, ReuseWithdrawn),
    "matcher": (PushOrdered, BlocksUnavailable, CancelOrdered),
    "reuse": (ReuseAnswered, ReuseReleased),
    "router": (
        RouteDecided,
        RequestServed,
        RouteAsked,
        CancelOrdered,
        ReuseAsked,
        ReuseReleased,
        CacheAsked,
        PromptMapped,
    ),
    "guest": (RouteAnswered,),
    "observer": (),
    "operator": (DrainOrdered,),
}
"""The kinds of message that a role says, always in its own name."""
RANK_SAYS: tuple[type[Message], ...] = (PushDone, PushFailed, PushQuiesced)
"""What the ranks of an engine say, each as `<engine_id>-r<rank>`."""

_MATCHERS_HEAR = (
    *(subjects.of_kind(kind, to=MATCHER) for kind in (BlocksRegistered, BlocksReady)),
    *(subjects.of_kind(kind) for kind in (BlocksUnavailable, TransferClosed, CancelOrdered)),
)
_LISTS_ALL = ("matcher", "reuse", "router", "observer")
_BUCKETS: dict[Role, tuple[str, ...]] = {
    "matcher": (subjects.LEASES_BUCKET,),
    "reuse": (subjects.LEASES_BUCKET, subjects.CONVERSATIONS_BUCKET),
    "router": (SECRETS_BUCKET, subjects.ROUTING_BUCKET),
}
"""Buckets beside the engines' cards, which everybody watches."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """One process, or one engine with all its ranks: one key pair, one user of NATS."""

    name: str
    role: Role
    ranks: int = 0
    """Of an engine: how many ranks speak beside its scheduler."""
    own_matcher: bool = False
    """Of a prefill: it pairs its own transfers (setting `matcher = engine`)."""
    partitions: int = 1
    """Of a matcher: how many share the work; it may hold the lease of any part."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that it speaks as."""
        return (self.name, *self.rank_names)

    @property
    def rank_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-r{rank}" for rank in range(self.ranks))


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects that NATS lets a user publish and subscribe to; all else it denies."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responses: bool = False
    """It may answer whom it hears, on the reply subject, once and soon."""


def permissions_of(party: Party) -> Permissions:
    """What `party` may do."""
    if party.role == "operator":
        return _operator(party)
    says = (*SAYS[party.role], *((PushOrdered,) if party.own_matcher else ()))
    publish = [_spoken(kind, party.name) for kind in says]
    publish += [_spoken(kind, rank) for rank in party.rank_names for kind in RANK_SAYS]
    publish += [subjects.dead_letters_of(name) for name in party.names]
    publish += _jetstream(party) + _keys(party)
    subscribe = [*_heard(party), *(f"_INBOX_{name}.>" for name in party.names)]
    return Permissions(publish=_unique(publish), subscribe=_unique(subscribe), responses=party.role == "reuse")


def _operator(party: Party) -> Permissions:
    """Makes streams and buckets, and may look at everything; it speaks as nobody else either."""
    return Permissions(
        publish=(
            *(_spoken(kind, party.name) for kind in SAYS["operator"]),
            "$JS.API.>",
            "$KV.>",
            f"{MARK_ROOT}.{party.name}.*",
            subjects.dead_letters_of(party.name),
        ),
        subscribe=(subjects.everything(), f"{subjects.DEAD_LETTERS}.>", f"_INBOX_{party.name}.>"),
    )


def _spoken(kind: type[Message], name: str) -> str:
    return f"{subjects.ROOT}.{kind.PLANE}.{subjects.event_of(kind)}.{subjects.token(name)}.>"


def _heard(party: Party) -> list[str]:
    match party.role:
        case "prefill" | "decode":
            loads = subjects.of_kind(LoadReported).removesuffix("*") + party.name  # `kvbus engine` sees it drain
            return [subjects.addressed_to(party.name), loads, *(_MATCHERS_HEAR if party.own_matcher else ())]
        case "matcher":
            return list(_MATCHERS_HEAR)
        case "reuse":
            return [subjects.addressed_to(REUSE, "reuse"), subjects.of_kind(ReuseWithdrawn)]
        case "router":
            cache = f"{subjects.ROOT}.cache.>"
            decided = subjects.of_kind(RouteDecided)  # what other routers send is in no load report yet
            return [subjects.addressed_to(party.name), subjects.of_kind(LoadReported), cache, decided]
        case "guest":
            asked = [subjects.of_kind(RouteAsked, to=to) for to in (party.name, EVERYONE)]
            return [*asked, subjects.of_kind(LoadReported), f"{subjects.ROOT}.cache.>"]
        case "observer" | "operator":
            return [subjects.everything(), f"{subjects.DEAD_LETTERS}.>"]


def _jetstream(party: Party) -> list[str]:
    """Facts about streams, reads, and watches, on the engines' cards and for routers on who decides: no stream is
    made, changed or deleted."""
    cards = f"KV_{subjects.ENGINES_BUCKET}"
    watched = (subjects.ENGINES_BUCKET, *((subjects.ROUTING_BUCKET,) if party.role == "router" else ()))
    buckets = [f"KV_{name}" for name in _BUCKETS.get(party.role, ())]
    allowed = [f"$JS.API.STREAM.INFO.{stream}" for stream in (subjects.TRACE_STREAM, cards, *buckets)]
    allowed += [f"$JS.API.DIRECT.GET.{stream}" for stream in buckets]
    for name in watched:
        allowed += [f"$JS.API.CONSUMER.CREATE.KV_{name}.*.$KV.{name}.>", f"$JS.API.CONSUMER.DELETE.KV_{name}.*"]
    if party.role in _LISTS_ALL:
        allowed += [f"$JS.API.DIRECT.GET.{stream}" for stream in (subjects.TRACE_STREAM, cards)]
        allowed += [f"{MARK_ROOT}.{party.name}.*"]
    return allowed


def _keys(party: Party) -> list[str]:
    """The keys that are its own to write."""
    leases = f"$KV.{subjects.LEASES_BUCKET}"
    match party.role:
        case "prefill" | "decode":
            return [f"$KV.{subjects.ENGINES_BUCKET}.{party.name}"]
        case "matcher":
            parts = [f"{leases}.matcher-{part}-{party.partitions}" for part in range(party.partitions)]
            return [f"{leases}.matcher"] if party.partitions == 1 else parts
        case "reuse":
            return [f"{leases}.{HEARD_KEY}", f"$KV.{subjects.CONVERSATIONS_BUCKET}.*"]
        case "router":
            return [f"$KV.{SECRETS_BUCKET}.{KEY_OF_SECRET}"]
        case "guest" | "observer" | "operator":
            return []


def _unique(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given))
