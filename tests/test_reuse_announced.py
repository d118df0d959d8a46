"""Offers that are heard and not yet stored: claimed all the same, and once."""

from msgspec.structs import replace
from tests.test_reuse_core import HELD, KEY, OFFER, RULES, WITHDRAWN, asked, kept, offered, released

from kvbus.reuse.announced import ANNOUNCED_MAX, ANNOUNCED_S, Announced
from kvbus.reuse.core import Found, Verdict, judge_withdrawal, newest
from kvbus.reuse.engines import Standing
from kvbus_schemas import Post, ReuseOffered


def announced(
    offer: ReuseOffered, found: Found | None = None, *, standing: Standing = "live", old_is_live: bool = True
) -> tuple[Found | None, tuple[Post, ...]]:
    return newest(found, offer, RULES, standing=standing, old_is_live=old_is_live, age_s=0.0)


def test_an_offer_that_is_announced_and_not_yet_stored_is_claimed_once_whoever_stores_it() -> None:
    there, posts = announced(OFFER)
    claimed = asked(there)
    assert (claimed.event, posts) == ("granted", ())
    assert offered(OFFER, kept(claimed)) == Verdict("repeated")
    again, _ = announced(OFFER, kept(claimed))
    assert asked(again).event == "claimed"


def test_an_announced_offer_takes_the_place_of_an_older_one_whose_holder_is_told() -> None:
    newer = replace(OFFER, offer_id="i1-6", offer_seq=6)
    there, posts = announced(newer, HELD)
    assert posts == (released("i1-5", "replaced"),)
    assert there is not None
    assert there.record is not None
    assert (there.record.offer_id, there.revision) == ("i1-6", HELD.revision)
    assert announced(newer, HELD, old_is_live=False)[1] == ()
    for known in (OFFER, replace(OFFER, offer_id="i1-4", offer_seq=4)):
        assert announced(known, HELD) == (HELD, ())
    assert announced(replace(newer, offer_id="i0-1", incarnation="i0"), HELD, standing="gone") == (HELD, ())


def test_what_was_withdrawn_before_it_was_stored_is_not_granted() -> None:
    for reason in ("evicted", "restarted"):
        found = kept(judge_withdrawal(replace(WITHDRAWN, reason=reason), None))
        assert announced(OFFER, found) == (found, ())


def test_announcements_are_young_and_bounded_and_a_repeat_makes_none_younger() -> None:
    heard = Announced()
    heard.note(OFFER, 10.0)
    heard.note(replace(OFFER, remaining_s=900.0), 11.0)
    heard.note(replace(OFFER, offer_id="i1-4", offer_seq=4), 11.5)
    assert heard.of(KEY, 11.5) == (1.5, OFFER)
    assert heard.of(KEY, 10.0 + ANNOUNCED_S + 0.1) == (0.0, None)
    newer = replace(OFFER, offer_id="i1-6", offer_seq=6)
    heard.note(newer, 20.0)
    assert heard.of(KEY, 20.0) == (0.0, newer)
    for number in range(ANNOUNCED_MAX):
        heard.note(replace(OFFER, conversation=f"{number:032x}"), 20.0)
    assert heard.of(KEY, 20.0) == (0.0, None)
    assert heard.of(f"{0:032x}", 20.0)[1] is not None
