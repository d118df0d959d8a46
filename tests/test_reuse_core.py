"""What becomes of offers, questions and withdrawals: tables of messages in and verdicts out."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.presence import CARD_TTL_S
from kvbus.reuse.core import MARK_S, Found, Rules, Verdict, judge_ask, judge_offer, judge_withdrawal
from kvbus.reuse.engines import Engines, Standing
from kvbus.reuse.memory import Memory
from kvbus.reuse.record import BEFORE_MAX, Record, decode, encode
from kvbus_schemas import EngineCard, Post, ReuseAnswered, ReuseAsked, ReuseOffered, ReuseReleased, ReuseWithdrawn
from kvbus_schemas.reuse import MissReason

KEY = "c" * 32
TRANSFER = "7" * 32
RULES = Rules(min_tokens=64, margin_s=1.0, lifetime_max_s=3600.0)
OFFER = ReuseOffered(
    conversation=KEY, offer_id="i1-5", offer_seq=5, engine_id="d0", source="d0", incarnation="i1", block_count=7,
    block_size=16, token_count=100, chain=[bytes([link]) * 8 for link in range(7)], remaining_s=480.0,
)  # fmt: skip
ASKED = ReuseAsked(conversation=KEY)
WITHDRAWN = ReuseWithdrawn(conversation=KEY, offer_id="i1-5", engine_id="d0", reason="evicted", incarnation="i1")


def offered(
    offer: ReuseOffered,
    found: Found | None = None,
    *,
    standing: Standing = "live",
    old_is_live: bool = True,
    age_s: float = 0.0,
) -> Verdict:
    return judge_offer(offer, found, RULES, standing=standing, old_is_live=old_is_live, age_s=age_s)


def asked(found: Found | None, standing: Standing = "live", *, claim: bool = True, rules: Rules = RULES) -> Verdict:
    question = replace(ASKED, claim=claim)
    return judge_ask(question, found, rules, standing=standing, transfer_id=TRANSFER, if_missing="new")


def kept(verdict: Verdict, passed_s: float = 0.0) -> Found:
    """What the bucket has `passed_s` after the verdict was carried out."""
    assert verdict.write is not None
    return Found(verdict.write, 9, verdict.write.lifetime_s + verdict.write.slack_s - passed_s)


def test_an_offer_is_as_old_as_its_turn_however_late_it_was_heard_of() -> None:
    late = kept(offered(OFFER, age_s=100.0), passed_s=12.5)
    assert late.record is not None
    assert decode(encode(late.record)) == late.record
    answer = asked(late).answer
    assert answer is not None
    assert answer.age_s == pytest.approx(112.5)


def released(offer_id: str, reason: str, to: str = "d0") -> Post:
    return Post(to, ReuseReleased(conversation=KEY, offer_id=offer_id, transfer_id="", reason=reason))


HELD = kept(offered(OFFER))
OVER_REASONS: tuple[MissReason, ...] = ("claimed", "withdrawn", "too_short", "expired", "engine_gone")


def test_an_offer_is_kept_with_all_that_a_grant_needs() -> None:
    verdict = offered(OFFER)
    assert (verdict.event, verdict.posts) == ("stored", ())
    grant = asked(kept(verdict)).answer
    assert grant is not None
    assert grant.grant is not None
    assert grant.grant.transfer_id == TRANSFER
    assert (grant.grant.holder_id, grant.grant.holder_incarnation) == ("d0", "i1")
    assert (grant.grant.token_count, grant.grant.block_size, grant.grant.chain) == (100, 16, OFFER.chain)


def test_a_claim_leaves_a_record_that_nobody_can_claim() -> None:
    claimed = asked(HELD)
    again = asked(kept(claimed))
    assert again.answer is not None
    assert (again.answer.grant, again.answer.miss, again.write) == (None, "claimed", None)


def test_a_look_claims_nothing_and_carries_nothing_that_could_be_used_as_a_claim() -> None:
    verdict = asked(HELD, claim=False)
    assert (verdict.write, verdict.delete) == (None, False)
    assert verdict.answer is not None
    assert verdict.answer.grant is not None
    assert (verdict.answer.grant.transfer_id, verdict.answer.grant.chain) == ("", [])
    assert verdict.answer.grant.token_count == 100


@pytest.mark.parametrize("over", OVER_REASONS)
def test_an_offer_that_is_over_is_a_miss_with_its_reason(over: MissReason) -> None:
    record = HELD.record
    assert record is not None
    verdict = asked(Found(record.is_over(over, 100.0), 9, 100.0))
    assert verdict.answer is not None
    assert (verdict.answer.miss, verdict.write, verdict.delete) == (over, None, False)


@pytest.mark.parametrize(
    ("found", "standing", "miss", "deleted"),
    [
        (None, "unknown", "new", False),
        (Found(None, 9, 50.0), "unknown", "new", True),
        (kept(offered(OFFER), passed_s=479.5), "live", "expired", False),
        (HELD, "gone", "engine_gone", True),
        (HELD, "unknown", "engine_gone", False),
    ],
)
def test_a_miss_says_why_and_removes_only_what_can_never_be_had(
    found: Found | None, standing: Standing, miss: MissReason, deleted: bool
) -> None:
    verdict = asked(found, standing)
    assert verdict.answer is not None
    assert (verdict.answer.miss, verdict.answer.grant) == (miss, None)
    assert (verdict.write, verdict.posts) == (None, ())
    assert verdict.delete is deleted
    looked = asked(found, standing, claim=False)
    assert (looked.answer, looked.delete) == (verdict.answer, False)


def test_kv_of_another_layout_is_a_miss_and_stays_for_whoever_can_use_it() -> None:
    held = kept(offered(replace(OFFER, compat_hash="old")))
    for claim in (True, False):
        question = replace(ASKED, claim=claim, compat_hash="new")
        verdict = judge_ask(question, held, RULES, standing="live", transfer_id=TRANSFER, if_missing="new")
        assert verdict == Verdict("incompatible", answer=ReuseAnswered(conversation=KEY, miss="incompatible"))
    for ours, theirs in (("old", "old"), ("", "old"), ("new", "")):
        question, held = replace(ASKED, compat_hash=ours), kept(offered(replace(OFFER, compat_hash=theirs)))
        verdict = judge_ask(question, held, RULES, standing="live", transfer_id=TRANSFER, if_missing="new")
        assert verdict.event == "granted"


def test_too_few_tokens_are_released_by_whoever_finds_it_first() -> None:
    short = offered(replace(OFFER, token_count=63, chain=OFFER.chain[:4]))
    assert short.posts == (released("i1-5", "too_short"),)
    assert asked(kept(short)).posts == ()
    stricter = asked(HELD, rules=Rules(min_tokens=101))
    assert stricter.posts == (released("i1-5", "too_short"),)
    assert stricter.answer is not None
    assert stricter.answer.miss == "too_short"
    assert asked(HELD, claim=False, rules=Rules(min_tokens=101)).posts == ()


@pytest.mark.parametrize(
    ("newer", "event"),
    [
        (replace(OFFER, offer_id="i1-6", offer_seq=6), "replaced"),
        (replace(OFFER, offer_id="i2-1", offer_seq=1, incarnation="i2"), "replaced"),
        (replace(OFFER, offer_id="x-1", offer_seq=1, engine_id="d1", source="d1", incarnation="x"), "replaced"),
        (OFFER, "repeated"),
        (replace(OFFER, remaining_s=900.0), "repeated"),
        (replace(OFFER, offer_id="i1-4", offer_seq=4), "late"),
    ],
)
def test_a_newer_offer_replaces_and_an_older_or_equal_one_changes_nothing(newer: ReuseOffered, event: str) -> None:
    verdict = offered(newer, HELD)
    assert verdict.event == event
    assert (verdict.write is not None) == (event == "replaced")
    assert verdict.posts == ((released("i1-5", "replaced"),) if event == "replaced" else ())


def test_a_holder_that_is_gone_or_has_nothing_left_is_not_told_of_its_replacement() -> None:
    newer = replace(OFFER, offer_id="i1-6", offer_seq=6)
    assert offered(newer, HELD, old_is_live=False).posts == ()
    assert offered(newer, kept(asked(HELD))).posts == ()
    assert offered(newer, kept(offered(OFFER), passed_s=480.1)).posts == ()


@pytest.mark.parametrize("repeat", [OFFER, replace(OFFER, offer_id="i1-4", offer_seq=4)])
def test_no_repeat_brings_a_claimed_offer_back_wherever_the_conversation_went(repeat: ReuseOffered) -> None:
    found = kept(asked(HELD))
    assert offered(repeat, found).write is None
    for number in range(BEFORE_MAX):
        engine = f"e{number}"
        moved = replace(OFFER, offer_id="1", offer_seq=1, engine_id=engine, source=engine, incarnation="x")
        found = kept(offered(moved, found))
        assert offered(repeat, found).write is None
        assert offered(moved, found).write is None


def test_what_a_dead_incarnation_says_replaces_nothing_of_a_live_one() -> None:
    other = replace(OFFER, offer_id="i0-9", offer_seq=9, incarnation="i0")
    assert offered(other, HELD, standing="gone").event == "stale"
    assert offered(other, HELD, standing="gone", old_is_live=False).event == "stored"


def test_an_offer_lives_as_long_as_it_says_less_its_age_and_never_longer_than_the_limit() -> None:
    for remaining_s, age_s, lives_s in ((480.0, 0.0, 480.0), (480.0, 100.0, 380.0), (1e9, 0.0, 3600.0)):
        record = offered(replace(OFFER, remaining_s=remaining_s), age_s=age_s).write
        assert record is not None
        assert record.lifetime_s == lives_s
    assert offered(OFFER, age_s=479.5) == Verdict("expired")
    assert offered(replace(OFFER, remaining_s=0.0)) == Verdict("expired")


def test_no_write_makes_an_offer_live_longer() -> None:
    for passed_s in (0.0, 100.25, 478.9):
        found = kept(offered(replace(OFFER, remaining_s=480.0)), passed_s)
        for verdict in (asked(found), judge_withdrawal(WITHDRAWN, found)):
            assert verdict.write is not None
            assert verdict.write.over is not None
            assert verdict.write.lifetime_s == found.key_left_s + MARK_S  # for who has heard of the offer late
        assert asked(found, claim=False).write is None


def test_a_key_that_outlives_its_offer_by_a_part_of_a_second_is_expired_on_time() -> None:
    found = kept(offered(replace(OFFER, remaining_s=10.25)), passed_s=9.3)
    assert found.key_left_s == pytest.approx(1.7)
    assert found.left_s == pytest.approx(0.95)
    verdict = asked(found)
    assert verdict.answer is not None
    assert verdict.answer.miss == "expired"


def test_the_answer_tells_how_old_the_offer_is() -> None:
    verdict = asked(kept(offered(OFFER), passed_s=12.5))
    assert verdict.answer is not None
    assert verdict.answer.age_s == pytest.approx(12.5)


@pytest.mark.parametrize(
    "bad",
    [
        replace(OFFER, conversation="a.b.>"),
        replace(OFFER, conversation=""),
        replace(OFFER, conversation="C" * 32),
        replace(OFFER, engine_id="d0.>", source="d0.>"),
        replace(OFFER, source="d1"),
        replace(OFFER, remaining_s=float("nan")),
        replace(OFFER, remaining_s=float("inf")),
        replace(OFFER, token_count=0),
        replace(OFFER, block_size=0),
        replace(OFFER, block_size=-16),
        replace(OFFER, offer_seq=0),
        replace(OFFER, token_count=95),
    ],
)
def test_an_offer_that_cannot_be_true_is_refused(bad: ReuseOffered) -> None:
    assert offered(bad) == Verdict("invalid")


@pytest.mark.parametrize(
    ("reason", "miss"),
    [
        ("expired", "expired"), ("evicted", "withdrawn"), ("taken", "claimed"), ("released", "claimed"),
        ("restarted", "engine_gone"),
    ],
)  # fmt: skip
def test_a_withdrawal_ends_its_offer_and_says_why(reason: Any, miss: MissReason) -> None:
    verdict = judge_withdrawal(replace(WITHDRAWN, reason=reason), HELD)
    answer = asked(kept(verdict)).answer
    assert answer is not None
    assert answer.miss == miss
    assert judge_withdrawal(replace(WITHDRAWN, reason=reason), kept(verdict)) == Verdict("repeated")


def test_a_withdrawal_of_another_offer_or_by_another_engine_changes_nothing() -> None:
    for other in (
        replace(WITHDRAWN, offer_id="i1-4"),
        replace(WITHDRAWN, engine_id="d1"),
    ):
        assert judge_withdrawal(other, HELD) == Verdict("unknown")
    assert judge_withdrawal(replace(WITHDRAWN, source="d1"), HELD) == Verdict("invalid")


def test_a_withdrawal_that_overtakes_its_offer_still_ends_it_and_no_later_one() -> None:
    found = kept(judge_withdrawal(WITHDRAWN, None))
    assert offered(OFFER, found).write is None
    assert offered(replace(OFFER, offer_id="i1-6", offer_seq=6), found).write is not None
    assert judge_withdrawal(replace(WITHDRAWN, reason="expired"), None).write is None


def test_a_record_survives_its_bytes_and_unknown_ones_are_none() -> None:
    record = offered(OFFER, kept(offered(replace(OFFER, engine_id="d1", source="d1")))).write
    assert record is not None
    assert decode(encode(record)) == record
    for data in (b"", b"\xc1", b"\x80", b"\x91" * 5000, encode(record)[:-3], b"\xa1x"):
        assert decode(data) is None


def test_memory_is_bounded_and_the_latest_word_counts() -> None:
    memory = Memory(2)
    memory.note("a", "expired")
    memory.note("b", "expired")
    memory.note("a", "withdrawn")
    memory.note("c", "claimed")
    assert [memory.why_missing(name) for name in "abc"] == ["withdrawn", "new", "claimed"]


def card(incarnation: str) -> EngineCard:
    return EngineCard(
        engine_id="d0", incarnation=incarnation, role="decode", model="m", http_url="", block_size=16, num_blocks=9
    )


def test_only_the_incarnation_on_the_card_is_live_and_a_card_may_be_late() -> None:
    engines = Engines(now_s=0.0)
    assert engines.standing("d0", "i1", 1.0) == "unknown"
    assert engines.standing("d0", "i1", CARD_TTL_S) == "gone"
    engines.seen(card("i1"))
    assert (engines.standing("d0", "i1", 7.0), engines.standing("d0", "i0", 7.0)) == ("live", "gone")
    engines.seen(card("i2"))
    assert (engines.standing("d0", "i1", 8.0), engines.standing("d0", "i2", 8.0)) == ("gone", "live")
    engines.vanished("d0", 9.0)
    assert engines.standing("d0", "i2", 9.0) == "gone"


def test_a_card_that_vanishes_with_nats_is_not_gone_before_it_could_be_renewed() -> None:
    engines = Engines(now_s=0.0)
    engines.seen(card("i1"))
    engines.reconnected(100.0)
    engines.vanished("d0", 100.1)
    assert engines.standing("d0", "i1", 105.0) == "live"
    assert engines.standing("d0", "i1", 106.1) == "gone"


def test_a_record_of_a_thousand_tokens_is_small() -> None:
    record = Record(
        offer_id="0123456789ab-12345", offer_seq=12345, engine_id="decode-0", incarnation="0123456789ab",
        token_count=1024, block_size=16, chain=[b"12345678"] * 64, lifetime_s=480.0,
    )  # fmt: skip
    assert len(encode(record)) < 850
    assert len(encode(record.is_over("claimed", 100.0))) < 220
