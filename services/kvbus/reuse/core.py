"""What becomes of an offer, a question, a withdrawal. Pure: a message and what the bucket has, a verdict out.

Theory of operation. A conversation has one key, whose value is the record of its newest offer. A verdict names the
record to write in the place of what was found, and what to say once that has succeeded; the shell writes by
compare-and-set and, where somebody else was faster, reads again and asks for another verdict. So every rule here
holds across any number of processes and restarts.

    found            message                      written               said
    nothing          ReuseOffered                 held                  -
    any older        ReuseOffered                 held                  ReuseReleased(replaced) -> old holder, if live
    same or newer    ReuseOffered                 -                     -
    any              ReuseOffered, too short      over: too_short       ReuseReleased(too_short) -> its engine
    held             ReuseAsked                   over: claimed         the grant
    held             ReuseAsked, holder gone      (key deleted)         miss engine_gone
    held             ReuseAsked, too short        over: too_short       miss, ReuseReleased(too_short) -> holder
    held             ReuseAsked, not to claim     -                     the grant, without transfer id and chain
    held             ReuseAsked, other KV layout  -                     miss incompatible
    over             ReuseAsked                   -                     miss, with the reason
    held             ReuseWithdrawn of it         over: withdrawn, ...  -
    nothing          ReuseWithdrawn               over, for a moment    - (its offer may be on its way)

A claim writes `over` instead of deleting the key, and that outlives the offer: a repeat of the same offer, heard late,
by another process or after a restart, would otherwise be stored and claimed again. No write makes an offer live longer.

A turn may follow within milliseconds of the last one's end, while the last one's offer is still on its way into the
bucket. So every process hears every offer, and whoever is asked takes what it has heard as if it were there (`newest`):
the claim's compare-and-set then writes offer and claim in one, and whoever comes to store the offer finds it known.
"""

import math
import re
from dataclasses import dataclass

from kvbus.reuse.engines import Standing
from kvbus.reuse.record import Record, mark_of, record_of
from kvbus_schemas import Post, ReuseAnswered, ReuseAsked, ReuseGrant, ReuseOffered, ReuseReleased, ReuseWithdrawn
from kvbus_schemas.reuse import MissReason
from kvbus_schemas.subjects import SubjectTokenError, token

WHY_WITHDRAWN: dict[str, MissReason] = {
    "expired": "expired",
    "evicted": "withdrawn",
    "taken": "claimed",
    "released": "claimed",
    "restarted": "engine_gone",
}
MARK_S = 10.0
"""How long a withdrawal waits for an offer that it has overtaken; and for how long it is known beyond an offer's end
that the offer is over: whoever has heard of it late believes that it ends later."""

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits. Seconds and tokens."""

    min_tokens: int = 64
    margin_s: float = 1.0
    """An offer with less left than this is not worth a transfer."""
    lifetime_max_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Found:
    """What the bucket has under a key. `record` is None when it cannot be read; `key_left_s` is the key's lifetime."""

    record: Record | None
    revision: int
    key_left_s: float

    @property
    def left_s(self) -> float:
        """Seconds to the offer's end."""
        return self.key_left_s - (self.record.slack_s if self.record else 0.0)

    @property
    def is_held(self) -> bool:
        """True if the offer is there to be claimed, as far as the bucket knows."""
        return self.record is not None and self.record.over is None and self.left_s > 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`event` is for the counters. `write` replaces what was found; `posts` and `answer` hold once that is done."""

    event: str
    write: Record | None = None
    delete: bool = False
    posts: tuple[Post, ...] = ()
    answer: ReuseAnswered | None = None


def is_key(conversation: str) -> bool:
    """True for what `conversation_key` makes; nothing else becomes a key of the bucket or a token of a subject."""
    return _KEY.fullmatch(conversation) is not None


def flaw_of(message: ReuseOffered | ReuseWithdrawn) -> str:
    """What is wrong with a message, in one word; empty when nothing is."""
    try:
        token(message.engine_id)
    except SubjectTokenError:
        return "engine_id"
    if not is_key(message.conversation):
        return "conversation"
    if message.source not in ("", message.engine_id):
        return "speaker"
    return _flaw_of_blocks(message) if isinstance(message, ReuseOffered) else ""


def _flaw_of_blocks(offer: ReuseOffered) -> str:
    if not math.isfinite(offer.remaining_s):
        return "remaining_s"
    if min(offer.token_count, offer.block_size, offer.offer_seq) < 1:
        return "counts"
    return "" if len(offer.chain) <= -(-offer.token_count // offer.block_size) else "chain"


def judge_offer(
    offer: ReuseOffered, found: Found | None, rules: Rules, *, standing: Standing, old_is_live: bool, age_s: float = 0.0
) -> Verdict:
    """An engine keeps a turn's blocks. `standing` is the engine's (see Engines), `old_is_live` whether the holder of
    the found record lives; `age_s` is above 0 for what comes out of the stream."""
    left_s = min(offer.remaining_s - age_s, rules.lifetime_max_s)
    old = found.record if found else None
    if flaw_of(offer):
        return Verdict("invalid")
    if left_s <= rules.margin_s:
        return Verdict("expired")
    if standing == "gone" and old is not None and old_is_live:
        return Verdict("stale")
    if old is not None and old.knows(offer):
        return Verdict("repeated" if offer.offer_id == old.offer_id else "late")
    before = old.history(offer.engine_id, offer.incarnation) if old else []
    record = record_of(offer, left_s, before, age_s=max(0.0, age_s))
    posts: list[Post] = []
    if old is not None and found is not None and found.is_held and old_is_live:
        posts.append(_released(offer.conversation, old, "replaced"))
    if offer.token_count < rules.min_tokens:
        record = record.is_over("too_short", left_s + MARK_S)
        posts.append(_released(offer.conversation, record, "too_short"))
        return Verdict("too_short", write=record, posts=tuple(posts))
    return Verdict("replaced" if posts else "stored", write=record, posts=tuple(posts))


def judge_withdrawal(message: ReuseWithdrawn, found: Found | None) -> Verdict:
    """An engine has let an offer go."""
    if flaw_of(message):
        return Verdict("invalid")
    reason = WHY_WITHDRAWN[message.reason]
    if found is None:
        mark = None if message.reason == "expired" else mark_of(message, reason, MARK_S)
        return Verdict("unknown", write=mark)
    record = found.record
    if record is None or (record.engine_id, record.offer_id) != (message.engine_id, message.offer_id):
        return Verdict("unknown")
    if record.over is not None:
        return Verdict("repeated")
    return Verdict(message.reason, write=_over(record, reason, found))


def newest(
    found: Found | None,
    announced: ReuseOffered | None,
    rules: Rules,
    *,
    standing: Standing,
    old_is_live: bool,
    age_s: float,
) -> tuple[Found | None, tuple[Post, ...]]:
    """What the bucket is about to have: `found`, or `announced` (heard `age_s` ago) where that is newer; and what is
    to be said once it has been written. `standing` is the announcing engine's, `old_is_live` says whether the holder of
    `found` lives."""
    if announced is None:
        return found, ()
    verdict = judge_offer(announced, found, rules, standing=standing, old_is_live=old_is_live, age_s=age_s)
    if verdict.write is None:
        return found, ()
    record = verdict.write
    return Found(record, found.revision if found else 0, record.lifetime_s + record.slack_s), verdict.posts


def judge_ask(  # noqa: PLR0911  (one for each reason)
    asked: ReuseAsked,
    found: Found | None,
    rules: Rules,
    *,
    standing: Standing,
    transfer_id: str,
    if_missing: MissReason,
) -> Verdict:
    """A router wants the blocks. `standing` is the holder's, `transfer_id` new for this claim, `if_missing` the reason
    to give when there is no key."""
    if found is None:
        return _miss(asked, if_missing)
    record = found.record
    if record is None:
        return _miss(asked, "new", delete=asked.claim)
    if reason := record.over or ("expired" if found.left_s <= rules.margin_s else None):
        return _miss(asked, reason)
    if standing != "live":
        return _miss(asked, "engine_gone", delete=asked.claim and standing == "gone")
    if asked.compat_hash and record.compat_hash and asked.compat_hash != record.compat_hash:
        return _miss(asked, "incompatible")
    if record.token_count < rules.min_tokens:
        return _too_short(asked, record, found)
    answer = ReuseAnswered(
        conversation=asked.conversation,
        grant=_grant(asked, record, transfer_id),
        age_s=round(record.age_s + max(0.0, record.lifetime_s - found.left_s), 3),
    )
    taken = _over(record, "claimed", found) if asked.claim else None
    return Verdict("granted" if asked.claim else "looked", write=taken, answer=answer)


def _miss(asked: ReuseAsked, reason: MissReason, *, delete: bool = False) -> Verdict:
    return Verdict(reason, delete=delete, answer=ReuseAnswered(conversation=asked.conversation, miss=reason))


def _too_short(asked: ReuseAsked, record: Record, found: Found) -> Verdict:
    answer = ReuseAnswered(conversation=asked.conversation, miss="too_short")
    if not asked.claim:
        return Verdict("too_short", answer=answer)
    post = _released(asked.conversation, record, "too_short")
    return Verdict("too_short", write=_over(record, "too_short", found), posts=(post,), answer=answer)


def _over(record: Record, reason: MissReason, found: Found) -> Record:
    return record.is_over(reason, found.key_left_s + MARK_S)


def _grant(asked: ReuseAsked, record: Record, transfer_id: str) -> ReuseGrant:
    return ReuseGrant(
        transfer_id=transfer_id if asked.claim else "",
        offer_id=record.offer_id,
        holder_id=record.engine_id,
        holder_incarnation=record.incarnation,
        conversation=asked.conversation,
        token_count=record.token_count,
        block_size=record.block_size,
        chain=record.chain if asked.claim else [],
    )


def _released(conversation: str, record: Record, reason: str) -> Post:
    """No transfer has begun, so there is no transfer id."""
    released = ReuseReleased(conversation=conversation, offer_id=record.offer_id, transfer_id="", reason=reason)
    return Post(record.engine_id, released)
