"""The matcher's core speaks only in messages: facts and the time in, whole lists of posts out."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from kvbus.matcher.core import MatcherCore
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    Message,
    Post,
    PushOrdered,
    TransferClosed,
)

T = "a" * 32


def card(engine_id: str, incarnation: str = "1", **changes: Any) -> EngineCard:
    role = "prefill" if engine_id.startswith("p") else "decode"
    facts: dict[str, Any] = {
        "role": role, "model": "m", "http_url": "http://h", "block_size": 16, "num_blocks": 99, "compat_hash": "c"
    }  # fmt: skip
    return EngineCard(engine_id=engine_id, incarnation=incarnation, **(facts | changes))


def registered(**changes: Any) -> BlocksRegistered:
    facts: dict[str, Any] = {
        "transfer_id": T, "producer_id": "p0", "producer_incarnation": "1", "consumer_id": "d0",
        "consumer_incarnation": "1", "block_ids": [[5, 6, 7]], "first_block": 1, "token_count": 60,
        "prompt_digest": "f00d", "block_size": 16, "compat_hash": "c", "lease_s": 30.0,
    }  # fmt: skip
    return BlocksRegistered(**(facts | changes))


def ready(**changes: Any) -> BlocksReady:
    facts: dict[str, Any] = {
        "transfer_id": T, "producer_id": "p0", "block_ids": [[1, 2, 3, 4]], "token_count": 60,
        "prompt_digest": "f00d", "lease_s": 30.0,
    }  # fmt: skip
    return BlocksReady(**(facts | changes))


def order(lease_s: float = 30.0, **changes: Any) -> Post:
    message = PushOrdered(
        transfer_id=T, producer_id="p0", producer_incarnation="1", consumer_id="d0", consumer_incarnation="1",
        block_ids=[[5, 6, 7]], first_block=1, token_count=60, prompt_digest="f00d", lease_s=lease_s,
    )  # fmt: skip
    return Post("p0", replace(message, **changes))


def unavailable(to: str, reason: Any, detail: str, **changes: Any) -> Post:
    return Post(
        to, replace(BlocksUnavailable(transfer_id=T, producer_id="p0", reason=reason, detail=detail), **changes)
    )


CLOSED = TransferClosed(transfer_id=T, producer_id="p0", consumer_id="d0", outcome="completed")
CANCEL = CancelOrdered(transfer_id=T, reason="client_gone")
FAILED = BlocksUnavailable(transfer_id=T, producer_id="p0", reason="failed", detail="boom")


def check_invariants(core: MatcherCore) -> None:
    book = core._book
    assert len(book.open) <= book.transfers_max
    assert not [key for key in book.open if key in book.over]
    for key, transfer in book.open.items():
        assert transfer.registration or transfer.ready
        assert transfer.ordered_to is None or transfer.registration
        assert {message.key for _, message in transfer.story} <= {key}


@pytest.fixture
def core() -> Iterator[MatcherCore]:
    core = MatcherCore()
    core.engine_seen(card("p0"), 0)
    core.engine_seen(card("d0"), 0)
    yield core
    check_invariants(core)


# Orders


def test_a_valid_registration_is_ordered_at_once_without_waiting_for_readiness(core: MatcherCore) -> None:
    assert core.receive(registered(), 0) == [order()]


@pytest.mark.parametrize("arrival", list(permutations([registered(), ready()])))
def test_either_arrival_order_orders_one_push(core: MatcherCore, arrival: tuple[Message, ...]) -> None:
    assert [post for message in arrival for post in core.receive(message, 0)] == [order()]
    assert (core.open_count, core.tombstone_count) == (1, 0)


def test_what_is_delivered_again_changes_nothing(core: MatcherCore) -> None:
    core.receive(registered(seq=4), 0)
    core.receive(ready(seq=9), 0)
    assert [core.receive(registered(seq=4), 1), core.receive(ready(seq=9), 1)] == [[], []]
    assert core.counters["ordered"] == 1
    assert not core.contradictions


def test_a_registration_published_again_has_its_order_repeated_with_what_is_left_of_the_lease(
    core: MatcherCore,
) -> None:
    core.receive(registered(seq=4), 0)
    assert core.receive(registered(seq=5, lease_s=29.0), 1) == [order(lease_s=29.0)]


def test_an_order_carries_the_trace_and_the_incarnation_that_was_found(core: MatcherCore) -> None:
    message = registered(producer_incarnation="", trace_id="t" * 32, span_id="s" * 16)
    assert core.receive(message, 0) == [order(trace_id="t" * 32, span_id="s" * 16)]


def test_keys_are_opaque_so_that_the_prompts_of_one_request_have_a_transfer_each(core: MatcherCore) -> None:
    keys = [f"{T}-{digest}" for digest in ("aa", "bb")]
    posts = [core.receive(registered(transfer_id=key), 0) for key in keys]
    assert posts == [[order(transfer_id=key)] for key in keys]


def test_a_matcher_that_takes_over_orders_again_what_is_open(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    core.receive(registered(transfer_id="b" * 32), 0)
    core.receive(replace(CLOSED, transfer_id="b" * 32), 1)
    assert core.standing_orders(10) == [order(lease_s=20.0)]


def test_an_answer_made_before_a_take_over_is_not_wanted_once_the_consumer_has_closed(core: MatcherCore) -> None:
    posts = core.receive(registered(compat_hash="x"), 0)
    assert [core.is_wanted(post) for post in posts] == [True, True]
    core.receive(CLOSED, 1)
    assert [core.is_wanted(post) for post in posts] == [False, False]
    assert not core.is_wanted(order())


# Refusals

REFUSALS = [
    ({"lease_s": 0.0}, "lease", ["0.000", "above 0"]),
    ({"producer_id": "d0"}, "self", ["'d0'"]),
    ({"block_ids": [[5, 6]]}, "block_count", ["2 blocks", "need 3"]),
    ({"block_ids": [[5, 6, 7], [8]]}, "block_count", ["group 1", "1 blocks", "need 3"]),
    ({"block_ids": []}, "block_count", ["0 blocks", "need 3"]),
    ({"first_block": 9}, "block_count", ["3 blocks", "need -5"]),
    ({"token_count": 0}, "block_count", ["token_count is 0"]),
    ({"block_size": 0}, "block_count", ["block_size 0"]),
    ({"first_block": -1}, "block_count", ["first_block -1"]),
    ({"block_size": 32, "first_block": 0, "block_ids": [[1, 2]]}, "block_size", ["32", "16"]),
    ({"compat_hash": "other"}, "compat_hash", ["'other'", "'c'"]),
]


@pytest.mark.parametrize(("changes", "code", "words"), REFUSALS)
def test_a_registration_that_cannot_be_right_is_refused_to_both_sides_and_names_both_values(
    core: MatcherCore, changes: dict[str, Any], code: str, words: list[str]
) -> None:
    posts = core.receive(registered(**changes), 0)
    assert [post.to for post in posts] == list(dict.fromkeys(["d0", changes.get("producer_id", "p0")]))
    first = posts[0].message
    assert isinstance(first, BlocksUnavailable)
    assert first.reason == "refused"
    assert [word for word in words if word not in first.detail] == []
    assert core.refused == {code: 1}
    assert (core.open_count, core.tombstone_count) == (0, 1)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"model": "n"}, "model", "models differ: consumer 'd0' has 'm', producer 'p0' has 'n'"),
        (
            {"block_size": 8},
            "block_size",
            "block sizes differ: the registration of consumer 'd0' says 16, producer 'p0' has 8",
        ),
        (
            {"compat_hash": "x"},
            "compat_hash",
            "compatibility hashes differ: consumer 'd0' has 'c', producer 'p0' has 'x' "
            "(model, dtype, attention backend and versions must be equal)",
        ),
    ],
)
def test_engines_whose_blocks_differ_are_refused_with_both_values(change: dict[str, Any], code: str, text: str) -> None:
    core = MatcherCore()
    core.engine_seen(card("p0", **change), 0)
    core.engine_seen(card("d0"), 0)
    assert core.receive(registered(), 0) == [unavailable("d0", "refused", text), unavailable("p0", "refused", text)]
    assert core.refused == {code: 1}


def test_a_full_prefix_hit_registers_no_blocks_and_is_ordered(core: MatcherCore) -> None:
    assert core.receive(registered(first_block=4, block_ids=[[]]), 0) == [order(first_block=4, block_ids=[[]])]


def test_a_full_matcher_refuses_and_says_its_limit(core: MatcherCore) -> None:
    core._book.transfers_max = 1
    core.receive(registered(transfer_id="b" * 32), 0)
    text = "matcher_full: 1 transfers are open, which is the limit"
    assert core.receive(registered(), 0) == [unavailable("d0", "refused", text), unavailable("p0", "refused", text)]
    assert core.receive(ready(transfer_id="c" * 32), 0) == []
    assert core.open_count == 1


def test_a_refused_registration_that_is_published_again_is_answered_again(core: MatcherCore) -> None:
    [answer, _] = core.receive(registered(seq=1, token_count=1), 0)
    assert core.receive(registered(seq=1, token_count=1), 0) == []
    assert core.receive(registered(seq=2, token_count=1), 0) == [answer]


# Readiness that contradicts

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_digest": "beef"}, "prompt_digest differs: the consumer registered 'f00d', the producer has 'beef'"),
    ({"token_count": 61}, "token_count differs: the consumer registered 60, the producer has 61"),
    ({"consumer_id": "d1"}, "consumer differs: the consumer registered 'd0', the producer has 'd1'"),
    ({"block_size": 8}, "block_size differs: the consumer registered 16, the producer has 8"),
]


@pytest.mark.parametrize(("change", "text"), CONTRADICTIONS)
def test_readiness_that_contradicts_an_order_cancels_both_and_keeps_the_story(
    core: MatcherCore, change: dict[str, Any], text: str
) -> None:
    core.receive(registered(), 1)
    cancel = CancelOrdered(transfer_id=T, reason=text, consumer_id="d0")
    assert core.receive(ready(**change), 2) == [Post("p0", cancel), Post("d0", cancel)]
    [error] = core.contradictions
    assert (error.text, [(at_s, type(m).__name__) for at_s, m in error.story][:2]) == (
        text, [(1, "BlocksRegistered"), (2, "BlocksReady")]
    )  # fmt: skip
    assert core.open_count == 0


@pytest.mark.parametrize(("change", "text"), CONTRADICTIONS)
def test_a_registration_that_contradicts_readiness_is_refused(
    core: MatcherCore, change: dict[str, Any], text: str
) -> None:
    core.receive(ready(**change), 0)
    assert core.receive(registered(), 0) == [unavailable("d0", "refused", text), unavailable("p0", "refused", text)]


def test_readiness_of_another_producer_cancels_all_three(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    posts = core.receive(ready(producer_id="p1"), 0)
    assert [(post.to, type(post.message)) for post in posts] == [(to, CancelOrdered) for to in ("p0", "p1", "d0")]


def test_two_readinesses_that_differ_cancel_their_producer(core: MatcherCore) -> None:
    core.receive(ready(), 0)
    posts = core.receive(ready(token_count=61), 0)
    assert [(post.to, type(post.message)) for post in posts] == [("p0", CancelOrdered)]
    assert core.counters["contradictions"] == 1


def test_of_two_registrations_the_first_one_stands(core: MatcherCore) -> None:
    core.engine_seen(card("d1"), 0)
    core.receive(registered(), 0)
    text = "another registration of this transfer stands, by 'd0'"
    other = registered(consumer_id="d1", block_ids=[[8, 9, 10]])
    assert core.receive(other, 0) == [unavailable("d1", "refused", text)]
    assert core.receive(other, 0) == []
    assert core.standing_orders(0) == [order()]
    assert core.counters["contradictions"] == 1


# Ends


def test_unavailable_blocks_are_told_to_a_consumer_that_registers_later(core: MatcherCore) -> None:
    assert core.receive(FAILED, 0) == []
    assert core.receive(registered(), 0) == [unavailable("d0", "failed", "boom")]
    assert core.receive(registered(), 0) == []


def test_unavailable_blocks_are_told_to_a_consumer_that_has_registered(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    assert core.receive(FAILED, 0) == [unavailable("d0", "failed", "boom")]
    assert core.receive(FAILED, 0) == []
    assert core.open_count == 0


def test_unavailability_said_by_a_stranger_is_dropped(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    assert core.receive(replace(FAILED, producer_id="p9"), 0) == []
    assert (core.open_count, core.counters["dropped"]) == (1, 1)


def test_a_cancelled_transfer_answers_its_late_registration_with_aborted(core: MatcherCore) -> None:
    assert core.receive(CANCEL, 0) == []
    assert core.receive(registered(), 0) == [unavailable("d0", "aborted", "cancelled: client_gone")]


def test_a_cancellation_is_not_relayed(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    assert core.receive(CANCEL, 0) == []
    assert (core.open_count, core.tombstone_count) == (0, 1)


def test_a_closed_transfer_is_forgotten_and_never_opened_again(core: MatcherCore) -> None:
    core.receive(registered(seq=1), 0)
    assert core.receive(CLOSED, 1) == []
    assert core.receive(registered(seq=1), 2) == []
    assert core.receive(ready(), 2) == []
    assert (core.open_count, core.tombstone_count) == (0, 1)


def test_another_consumer_that_uses_a_closed_transfer_is_told_so(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    core.receive(CLOSED, 1)
    text = "the transfer was closed before: completed"
    assert core.receive(registered(consumer_id="d1"), 2) == [unavailable("d1", "refused", text)]


def test_a_stranger_cannot_close_a_transfer(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    core.receive(replace(CLOSED, consumer_id="d9"), 0)
    assert core.standing_orders(0) == [order()]


def test_a_lease_ends_on_time_and_silently(core: MatcherCore) -> None:
    core.receive(registered(lease_s=2.0), 0)
    core.receive(ready(transfer_id="b" * 32, lease_s=2.0), 0)
    assert (core.tick(1.9), core.open_count) == ([], 2)
    assert (core.tick(2.0), core.open_count) == ([], 0)
    assert core.counters["expired"] == 2


def test_tombstones_go_after_their_time_and_never_pass_their_limit() -> None:
    core = MatcherCore(tombstone_s=300, tombstones_max=3)
    for number in range(5):
        core.receive(replace(CANCEL, transfer_id=f"{number:032}"), number)
    assert core.tombstone_count == 3
    core.tick(303)
    assert core.tombstone_count == 1
    core.tick(304)
    assert core.tombstone_count == 0


def test_kinds_that_are_not_for_the_matcher_are_dropped_and_counted(core: MatcherCore) -> None:
    assert core.receive(card("p0"), 0) == []
    assert core.counters["dropped"] == 1


# Engines come and go


def test_a_registration_waits_for_a_card_that_is_still_on_its_way() -> None:
    core = MatcherCore()
    assert core.receive(registered(), 0) == []
    assert core.engine_seen(card("d0"), 0.5) == []
    assert core.tick(0.7) == []
    assert core.engine_seen(card("p0"), 0.9) == [order(lease_s=29.1)]


def test_a_registration_for_an_unknown_producer_is_refused_after_a_second() -> None:
    core = MatcherCore()
    core.engine_seen(card("d0"), 0)
    core.receive(registered(), 0)
    assert core.tick(0.99) == []
    text = "producer 'p0' of incarnation '1' is not known: no engine of that name has announced itself"
    assert core.tick(1.0) == [unavailable("d0", "refused", text)]
    assert core.tick(1.1) == []


def test_a_registration_for_an_incarnation_not_seen_yet_waits_and_then_names_both(core: MatcherCore) -> None:
    assert core.receive(registered(producer_incarnation="2"), 0) == []
    text = "producer 'p0' of incarnation '2' is not known: '1' lives now"
    assert core.tick(1) == [unavailable("d0", "refused", text), unavailable("p0", "refused", text)]


def test_a_registration_for_a_producer_that_is_known_to_be_gone_is_answered_at_once(core: MatcherCore) -> None:
    core.engine_seen(card("p0", "2"), 0)
    text = "producer 'p0' of incarnation '1' is gone: '2' lives now"
    assert core.receive(registered(), 0)[0] == unavailable("d0", "producer_gone", text)


@pytest.mark.parametrize("how", ["card expired", "new incarnation"])
def test_when_a_producer_is_gone_its_consumers_are_told_at_once(core: MatcherCore, how: str) -> None:
    core.receive(registered(), 0)
    expected = [unavailable("d0", "producer_gone", "engine 'p0' is gone")]
    if how == "card expired":
        assert core.engine_gone("p0", "1", 1) == expected
    else:
        assert core.engine_seen(card("p0", "2"), 1) == expected
    assert core.open_count == 0


@pytest.mark.parametrize("how", ["card expired", "new incarnation"])
def test_when_a_consumer_is_gone_its_producers_are_told_to_stop(core: MatcherCore, how: str) -> None:
    core.receive(registered(), 0)
    expected = [Post("p0", CancelOrdered(transfer_id=T, reason="consumer_gone"))]
    if how == "card expired":
        assert core.engine_gone("d0", "1", 1) == expected
    else:
        assert core.engine_seen(card("d0", "2"), 1) == expected
    assert core.open_count == 0


def test_readiness_of_a_producer_that_is_gone_answers_the_late_registration(core: MatcherCore) -> None:
    core.receive(ready(), 0)
    assert core.engine_gone("p0", "1", 1) == []
    assert core.receive(registered(), 2) == [unavailable("d0", "producer_gone", "engine 'p0' is gone")]


def test_an_old_incarnation_that_expires_late_ends_nothing(core: MatcherCore) -> None:
    core.engine_seen(card("p0", "2"), 0)
    core.receive(registered(producer_incarnation="2"), 0)
    assert core.engine_gone("p0", "1", 1) == []
    assert core.open_count == 1


def test_a_renewed_card_changes_nothing(core: MatcherCore) -> None:
    core.receive(registered(), 0)
    assert core.engine_seen(card("p0", seq=7), 1) == []
    assert core.open_count == 1


# Replay


def test_a_replayed_registration_has_only_what_its_age_leaves_of_the_lease(core: MatcherCore) -> None:
    assert core.receive(registered(), 100, age_s=12.0) == [order(lease_s=18.0)]
    core.tick(118)
    assert core.open_count == 0


def test_a_replayed_registration_whose_lease_is_over_is_dropped(core: MatcherCore) -> None:
    assert core.receive(registered(), 100, age_s=30.0) == []
    assert (core.open_count, core.tombstone_count, core.counters["dropped"]) == (0, 0, 1)


STORY: list[Message] = [
    registered(seq=1), ready(seq=1), registered(transfer_id="b" * 32, seq=2), replace(CLOSED, seq=3),
    replace(CANCEL, transfer_id="c" * 32, seq=1), registered(transfer_id="c" * 32, seq=4),
    registered(transfer_id="d" * 32, seq=5, compat_hash="x"),
]  # fmt: skip


def _state(core: MatcherCore) -> tuple[list[str], list[str]]:
    return sorted(core._book.open), sorted(key for key in "abcd" if key * 32 in core._book.over)


def test_a_restarted_matcher_ends_where_the_first_one_was(core: MatcherCore) -> None:
    again = MatcherCore()
    again.engine_seen(card("p0"), 5)
    again.engine_seen(card("d0"), 5)
    for message in STORY:
        core.receive(message, 0)
    for _ in range(2):
        for message in STORY:
            again.receive(message, 5, age_s=5)
    assert _state(again) == _state(core) == (["b" * 32], ["a", "c", "d"])
    assert again.standing_orders(5) == core.standing_orders(5)


ENDS: list[Message] = [CLOSED, CANCEL, FAILED]


@pytest.mark.parametrize("end", ENDS, ids=lambda message: type(message).__name__)
def test_an_ended_transfer_is_over_in_every_arrival_order(end: Message) -> None:
    for arrival in permutations([registered(), ready(), end, end]):
        core = MatcherCore()
        core.engine_seen(card("p0"), 0)
        core.engine_seen(card("d0"), 0)
        for message in arrival:
            core.receive(message, 0)
        assert (core.open_count, core.tombstone_count, len(core.contradictions)) == (0, 1, 0), arrival
        check_invariants(core)


KEYS = st.sampled_from([letter * 32 for letter in "abcd"])


class AnyOrderAnyDuplication(RuleBasedStateMachine):
    """Two matchers hear the same facts, one in order and one shuffled and repeated: they end the same."""

    @initialize()
    def start(self) -> None:
        self.said: list[Message] = []
        self.in_order, self.shuffled = MatcherCore(), MatcherCore()
        for core in (self.in_order, self.shuffled):
            core.engine_seen(card("p0"), 0)
            core.engine_seen(card("d0"), 0)

    @rule(key=KEYS)
    def register(self, key: str) -> None:
        compat_hash = "x" if key[0] == "d" else "c"  # one of the four is always refused
        self.said.append(registered(transfer_id=key, compat_hash=compat_hash, seq=len(self.said)))

    @rule(key=KEYS)
    def finish_prefill(self, key: str) -> None:
        self.said.append(ready(transfer_id=key))

    @rule(key=KEYS, end=st.sampled_from(ENDS))
    def end(self, key: str, end: Message) -> None:
        self.said.append(replace(end, transfer_id=key))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        repeats = data.draw(st.lists(st.sampled_from(self.said), max_size=10)) if self.said else []
        for message in self.said:
            self.in_order.receive(message, 0)
        for message in data.draw(st.permutations(self.said + repeats)):
            self.shuffled.receive(message, 0)
        assert _state(self.in_order) == _state(self.shuffled)
        assert self.in_order.standing_orders(0) == self._sorted_like(self.shuffled.standing_orders(0))

    def _sorted_like(self, posts: list[Post]) -> list[Post]:
        keys = [post.message.key for post in self.in_order.standing_orders(0)]
        return sorted(posts, key=lambda post: keys.index(post.message.key))

    @invariant()
    def the_books_are_sound(self) -> None:
        for core in (self.in_order, self.shuffled):
            check_invariants(core)
            assert not core.contradictions


TestAnyOrderAnyDuplication = AnyOrderAnyDuplication.TestCase
TestAnyOrderAnyDuplication.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
