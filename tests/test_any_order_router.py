"""Any order, any duplication, same end: who lives, a dispatch, a claim, and a story."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.test_router_core import PREFILL, dispatch
from tests.test_router_turn import GRANT, KEY, granted, holder
from tests.test_trace_core import HANDOFF, T

from kvbus.engine.peers import FENCE_S, Peers
from kvbus.router.core import Leg, Verdict
from kvbus.router.turn import Turn
from kvbus.trace.core import Line, Story, stories_of
from kvbus_schemas import CancelOrdered, EngineCard, Mode, Post, RequestServed, ReuseAnswered, ReuseReleased

LISTS = settings(max_examples=200, deadline=None)
MACHINES = settings(max_examples=80, stateful_step_count=30, deadline=None)
ENGINES = st.sampled_from(["p", "d"])
INCARNATIONS = st.sampled_from(["1", "2", "3"])


def card(engine_id: str, incarnation: str) -> EngineCard:
    return EngineCard(
        engine_id=engine_id, role="prefill", model="m", http_url="", block_size=16, num_blocks=9, compat_hash="c",
        incarnation=incarnation,
    )  # fmt: skip


class PeersInAnyOrder(RuleBasedStateMachine):
    """Cards come, expire and come back, in any incarnation; a second core hears each of it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.once, self.twice = Peers(), Peers()
        self.live: dict[str, str] = {}
        self.gone_s: dict[tuple[str, str], float] = {}

    @rule(engine_id=ENGINES, incarnation=INCARNATIONS)
    def a_card_is_seen(self, engine_id: str, incarnation: str) -> None:
        before = self.live.get(engine_id)
        replaced = self.once.seen(card(engine_id, incarnation), self.now_s)
        for _ in range(2):
            self.twice.seen(card(engine_id, incarnation), self.now_s)
        assert (replaced.incarnation if replaced else None) == (before if before != incarnation else None)
        if before not in (None, incarnation):
            self.gone_s.setdefault((engine_id, str(before)), self.now_s)
        self.live[engine_id] = incarnation
        self.gone_s.pop((engine_id, incarnation), None)

    @rule(engine_id=ENGINES)
    def a_card_is_gone(self, engine_id: str) -> None:
        for core in (self.once, self.twice, self.twice):
            core.gone(engine_id, self.now_s)
        if engine_id in self.live:
            self.gone_s.setdefault((engine_id, self.live.pop(engine_id)), self.now_s)

    @rule(seconds=st.sampled_from([0.5, 3.0, FENCE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def only_what_was_gone_for_as_long_as_the_longest_write_is_fenced(self) -> None:
        for engine_id in ("p", "d"):
            for incarnation in ("1", "2", "3"):
                gone_s = self.gone_s.get((engine_id, incarnation))
                expected = gone_s is not None and self.now_s >= gone_s + FENCE_S
                for core in (self.once, self.twice):
                    assert core.fenced(engine_id, incarnation, self.now_s) == expected
                    assert (core.card(engine_id, incarnation) is not None) == (self.live.get(engine_id) == incarnation)


TestPeersInAnyOrder = PeersInAnyOrder.TestCase
TestPeersInAnyOrder.settings = MACHINES


class Hearing:
    """All that a dispatch has said, and whether it may."""

    def __init__(self, mode: Mode, attempt: int) -> None:
        self.dispatch = dispatch(mode, attempt=attempt)
        self.cancelled: list[str] = []
        self.last_words = 0

    def play(self, event: str) -> None:
        kind, _, detail = event.partition(" ")
        leg: Leg = "prefill" if detail.startswith("prefill") else "decode"
        match kind:
            case "answered":
                self.heard(self.dispatch.answered(leg, int(detail.split()[1])))
            case "failed":
                self.heard(self.dispatch.failed(leg, "broke off"))
            case "left":
                self.heard(self.dispatch.client_left())
            case "late":
                self.heard(self.dispatch.deadline_passed())
            case "ended":
                self.heard(self.dispatch.ended())
            case _:
                posts = self.dispatch.served("completed", 200)
                assert all(isinstance(post.message, RequestServed) for post in posts)
                self.last_words += len(posts)

    def heard(self, verdict: Verdict) -> None:
        assert not set(verdict.close) & self.dispatch.open, "a leg that is to be closed is not open any more"
        if verdict.step in ("stop", "retry", "give_up", "break_off"):
            assert self.dispatch.open <= {"prefill"}, "nobody waits for a decode whose answer goes nowhere"
        if verdict.step in ("give_up", "break_off"):
            assert verdict.problem is not None, "the client is told why"
        for post in verdict.posts:
            assert isinstance(post.message, CancelOrdered)
            self.cancelled.append(post.to)


EVENTS = st.lists(
    st.sampled_from(
        [
            *(f"answered {leg} {status}" for leg in ("prefill", "decode") for status in (200, 400, 503)),
            *("failed prefill", "failed decode", "left", "late", "ended", "served"),
        ]
    ),
    max_size=16,
)
MODES: st.SearchStrategy[Any] = st.sampled_from(["early", "deferred", "pull", "local"])


@given(MODES, st.integers(1, 2), EVENTS)
@LISTS
def test_whatever_happens_to_a_dispatch_each_engine_is_cancelled_once_and_one_last_word_is_said(
    mode: Mode, attempt: int, events: list[str]
) -> None:
    hearing = Hearing(mode, attempt)
    for event in [*events, "served"]:
        hearing.play(event)
        hearing.play(event)  # each fact twice
    assert max(Counter(hearing.cancelled).values(), default=0) <= 1
    assert hearing.last_words == 1
    if mode in ("pull", "local"):
        assert not hearing.cancelled


@given(MODES, EVENTS)
@LISTS
def test_when_the_client_leaves_no_leg_stays_open_whatever_came_before(mode: Mode, events: list[str]) -> None:
    hearing = Hearing(mode, 1)
    for event in [*events, "left"]:
        hearing.play(event)
    assert not hearing.dispatch.open


REPORTS = {
    "used": b'{"kvbus": {"reused_tokens": 64, "reuse": "hit"}}',
    "unused": b'{"kvbus": {"reused_tokens": 0, "reuse": "not needed"}}',
    "silent": None,
}
CLAIM_EVENTS = st.lists(
    st.sampled_from(["bind early", "bind local", "bind gone", "used", "unused", "silent", "late", "failed"]),
    max_size=12,
)


def told(turn: Turn, event: str) -> tuple[Post, ...]:
    if event.startswith("bind"):
        prefill = None if event == "bind local" else PREFILL
        known = None if event == "bind gone" else holder(compat_hash=PREFILL.compat_hash)
        return turn.bind("early" if prefill else "local", prefill, known)
    return turn.reported(REPORTS[event]) if event in REPORTS else turn.let_go(event)


@given(CLAIM_EVENTS, CLAIM_EVENTS)
@LISTS
def test_a_claim_is_taken_or_let_go_once_whatever_happens_and_however_often(
    before: list[str], after: list[str]
) -> None:
    turn = granted()
    posts = [post for event in before for _ in (0, 1) for post in told(turn, event)]
    posts += turn.let_go("end")
    assert not turn.is_open
    said = turn.said
    posts += [post for event in after for post in told(turn, event)]
    assert turn.said == said
    releases = [post.message for post in posts if isinstance(post.message, ReuseReleased)]
    assert len(releases) == len(posts) <= 1
    assert (turn.grant is None) == bool(releases)
    assert all(release.offer_id == GRANT.offer_id for release in releases)


def test_a_claim_whose_answer_comes_twice_is_still_one() -> None:
    turn = granted()
    turn.answered(ReuseAnswered(conversation=KEY, grant=GRANT))
    assert [post.to for post in (*turn.let_go("a"), *turn.let_go("b"))] == ["d"]


def summary(story: Story) -> tuple[object, ...]:
    return (story.transfer_id, story.request_id, story.conversation, story.mode, story.prefill_id, story.decode_id,
            story.outcome, story.status, story.ttft_ms, [stage.name for stage in story.stages()])  # fmt: skip


@given(st.permutations(HANDOFF))
@LISTS
def test_a_story_is_the_same_in_whatever_order_its_lines_are_given(lines: list[Line]) -> None:
    assert stories_of(lines) == stories_of(HANDOFF)


@given(st.lists(st.sampled_from(HANDOFF[1:]), max_size=8))
@LISTS
def test_messages_that_were_said_again_change_nothing_of_what_is_told(again: list[Line]) -> None:
    """A repeat is a message of its own in the stream, right after the first."""
    (story,) = stories_of([*HANDOFF, *again])
    (once,) = stories_of(HANDOFF)
    assert story.transfer_id == T
    assert summary(story) == summary(once)
