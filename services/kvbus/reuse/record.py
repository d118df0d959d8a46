"""What the bucket keeps of a conversation: its newest offer, and whether that is still to be had."""

import math
from typing import NamedTuple

import msgspec

from kvbus_schemas import ReuseOffered, ReuseWithdrawn
from kvbus_schemas.reuse import MissReason

BEFORE_MAX = 4
"""Other engines whose last offers a record remembers, the latest."""


class Spoken(NamedTuple):
    """How far an engine's offers of this conversation have come."""

    engine_id: str
    incarnation: str
    offer_seq: int


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of one key. An offer that is over stays, without its chain, until a little after its end: so that a
    repeat of it is known for one, after any restart, and so that a miss can say why."""

    offer_id: str
    offer_seq: int
    engine_id: str
    incarnation: str
    token_count: int = 0
    block_size: int = 0
    chain: list[bytes] = []
    compat_hash: str = ""
    lifetime_s: float
    """Seconds from the moment when this was written to the offer's end."""
    age_s: float = 0.0
    """How old the offer was at that moment; above 0 where it came out of the stream."""
    over: MissReason | None = None
    """Why there is nothing to be had; None: there is."""
    before: list[Spoken] = []

    @property
    def spoken(self) -> Spoken:
        """The offer's place among its engine's."""
        return Spoken(self.engine_id, self.incarnation, self.offer_seq)

    @property
    def slack_s(self) -> float:
        """By how much the key outlives the offer, since the bucket counts in whole seconds."""
        return max(1, math.ceil(self.lifetime_s)) - self.lifetime_s

    def knows(self, offer: ReuseOffered) -> bool:
        """True if the offer is this one, or older than what its engine has offered already."""
        if (offer.engine_id, offer.offer_id) == (self.engine_id, self.offer_id):
            return True
        who = (offer.engine_id, offer.incarnation)
        return any(spoken[:2] == who and offer.offer_seq <= spoken.offer_seq for spoken in (self.spoken, *self.before))

    def is_over(self, reason: MissReason, lifetime_s: float) -> "Record":
        """This record once its offer is gone, for `lifetime_s` more seconds."""
        return msgspec.structs.replace(self, over=reason, chain=[], compat_hash="", lifetime_s=lifetime_s)

    def history(self, engine_id: str, incarnation: str) -> list[Spoken]:
        """`before` of a record that replaces this one with an offer of that engine."""
        others = [spoken for spoken in (self.spoken, *self.before) if spoken[:2] != (engine_id, incarnation)]
        return others[:BEFORE_MAX]


def record_of(offer: ReuseOffered, lifetime_s: float, before: list[Spoken], age_s: float = 0.0) -> Record:
    """What is kept of an offer that was made `age_s` ago and has `lifetime_s` left."""
    return Record(
        offer_id=offer.offer_id,
        offer_seq=offer.offer_seq,
        engine_id=offer.engine_id,
        incarnation=offer.incarnation,
        token_count=offer.token_count,
        block_size=offer.block_size,
        chain=offer.chain,
        compat_hash=offer.compat_hash,
        lifetime_s=lifetime_s,
        age_s=age_s,
        before=before,
    )


def mark_of(message: ReuseWithdrawn, reason: MissReason, lifetime_s: float) -> Record:
    """What is kept of an offer that was withdrawn before it was heard of."""
    return Record(
        offer_id=message.offer_id,
        offer_seq=0,
        engine_id=message.engine_id,
        incarnation=message.incarnation,
        lifetime_s=lifetime_s,
        over=reason,
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """The record's bytes."""
    return _encoder.encode(record)


def decode(data: bytes) -> Record | None:
    """The record in `data`; None when there is none that this version could read."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
