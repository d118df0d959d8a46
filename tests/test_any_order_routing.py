"""Any order, any duplication, same end: what a router knows of prefix caches, and when it stops asking a guest."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.test_router_cache import cleared, index_of, removed, stored
from tests.test_router_guests_core import answer, asking

from kvbus.reuse.announced import Announced
from kvbus.router.asking import Heard
from kvbus.router.breaker import BREAKER_FAILURES, BREAKER_REST_S, Breaker
from kvbus.router.due import Due
from kvbus_schemas import ReuseOffered

LISTS = settings(max_examples=200, deadline=None)
NAMES = [bytes([letter]) * 8 for letter in b"abcd"]


@given(
    st.data(), st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(NAMES), min_size=1)), min_size=1, max_size=8)
)
@LISTS
def test_an_index_that_says_exact_is_what_the_engine_holds_whatever_was_lost_or_repeated(
    data: st.DataObject, changes: list[tuple[bool, set[bytes]]]
) -> None:
    held: set[bytes] = set()
    truth, said = {0: frozenset(held)}, []
    for seq, (stores, names) in enumerate(changes, 1):
        held = held | names if stores else held - names
        truth[seq] = frozenset(held)
        said.append(stored(seq, *sorted(names)) if stores else removed(seq, *sorted(names)))
    index = index_of()
    for news in data.draw(st.lists(st.sampled_from(said), max_size=16)):
        index.receive(news)
        if index.state("p0") == "exact":
            assert index.held("p0") == truth[index.seq("p0")]
    last = len(changes)
    for again in (cleared(last + 1, restates=True, block_count=len(held)), stored(last + 2, *sorted(held))):
        index.receive(again)
        index.receive(again)
    if held:
        assert index.state("p0") == "exact"
        assert index.held("p0") == held


class BreakerInAnyOrder(RuleBasedStateMachine):
    """Questions that overlap, end in any order, or are withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now_s = 0.0
        self.asked = 0

    @rule()
    def a_request_comes(self) -> None:
        self.asked += self.breaker.admits(self.now_s)

    @rule(how=st.sampled_from(["worked", "failed", "undecided"]))
    def an_answer_comes(self, how: str) -> None:
        if not self.asked:
            return
        self.asked -= 1
        if how == "worked":
            self.breaker.worked()
            assert not self.breaker.resting
        elif how == "failed":
            self.breaker.failed(self.now_s)
        else:
            self.breaker.undecided()

    @rule(seconds=st.sampled_from([0.1, BREAKER_REST_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def it_rests_after_so_many_failures_in_a_row_and_is_tried_again_in_the_end(self) -> None:
        assert self.breaker.resting == (self.breaker.failures >= BREAKER_FAILURES)

    def teardown(self) -> None:
        for _ in range(self.asked):
            self.breaker.undecided()
        assert self.breaker.admits(self.now_s + BREAKER_REST_S)


TestBreakerInAnyOrder = BreakerInAnyOrder.TestCase
TestBreakerInAnyOrder.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def announced(seq: int) -> ReuseOffered:
    return ReuseOffered(
        conversation="c" * 32, offer_id=f"i1-{seq}", offer_seq=seq, engine_id="d0", source="d0", incarnation="i1",
        block_count=1, block_size=16, token_count=16, chain=[], remaining_s=480.0,
    )  # fmt: skip


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
@LISTS
def test_of_one_engines_announcements_the_newest_counts_in_any_order(sequence: list[int]) -> None:
    heard = Announced()
    for seq in sequence:
        heard.note(announced(seq), 0.0)
    _, newest = heard.of("c" * 32, 0.01)
    assert newest is not None
    assert newest.offer_seq == max(sequence)


@given(st.lists(st.sampled_from(["ended", "taken"]), max_size=12))
@LISTS
def test_an_offer_is_expected_after_a_turns_end_and_no_more_once_it_is_taken(events: list[str]) -> None:
    due = Due()
    for event in events:
        if event == "ended":
            due.ended("c", 0.0)
        else:
            due.taken("c")
    assert due.expects("c", 0.001) == (bool(events) and events[-1] == "ended")


ANSWERS = st.lists(st.sampled_from(["right", "wrong", "stranger", "garbage", "expired", "withdrawn"]), max_size=12)


@given(ANSWERS)
@LISTS
def test_a_question_to_a_guest_is_settled_at_most_once_whatever_comes_and_however_often(events: list[str]) -> None:
    asks = asking("q")
    settled = []
    for event in events:
        heard: Heard | None = None
        match event:
            case "garbage":
                heard = asks.undecodable("q", "g", 0.01)
            case "expired":
                heard = asks.expired("q", 50.0, 0.05)
            case "withdrawn":
                asks.withdraw("q")
            case "stranger":
                heard = asks.answered(answer(source="somebody"), 0.01)
            case _:
                heard = asks.answered(answer(decode_id="d9") if event == "wrong" else answer(), 0.01)
        if heard is not None and heard.settles:
            settled.append((event, heard.choice is not None))
    ends = [event for event in events if event != "stranger"]
    expected = [] if not ends or ends[0] == "withdrawn" else [(ends[0], ends[0] == "right")]
    assert settled == expected
