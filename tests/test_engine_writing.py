"""The writing core: each block at most once, out of blocks that are ours, and quiet only when nothing is in flight."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus.engine.facts import Progress, Terms
from kvbus.engine.writing import Moves, Write, WritingCore
from kvbus_schemas import CancelOrdered, PushDone, PushFailed, PushOrdered, PushQuiesced, TransferClosed

T = "a" * 32
TERMS = Terms(T, "r", 10, "x")
ORDER = PushOrdered(
    transfer_id=T, producer_id="p", producer_lease=1, consumer_id="d", consumer_incarnation="d1",
    block_ids=[[21, 22, 23]], first_block=0, token_count=10, prompt_digest="x", lease_s=10.0,
)  # fmt: skip
CANCEL = CancelOrdered(transfer_id=T, reason="client_left", consumer_id="d")
CLOSED = TransferClosed(transfer_id=T, producer_id="p", consumer_id="d", outcome="completed")
WHOLE = Progress(T, "r", (1, 2, 3), 0, 3, final=True)


def new_core(*, progressive: bool = True) -> WritingCore:
    core = WritingCore("p", 0, 1, 4, 100, progressive=progressive)
    core.lease = 1
    return core


@pytest.fixture
def core() -> WritingCore:
    core = new_core()
    assert core.admit(TERMS, 0.0) == Moves()
    return core


def runs(moves: Moves) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(write.source_blocks, write.target_blocks) for write in moves.writes]


def said(moves: Moves) -> list[tuple[str, str]]:
    return [(post.to, type(post.message).__name__) for post in moves.posts]


def test_what_is_computed_is_written_once_it_is_ordered_and_not_before(core: WritingCore) -> None:
    assert core.progress(WHOLE, 0.1) == Moves()
    assert runs(core.receive(ORDER, 0.2)) == [((1, 2, 3), (21, 22, 23))]
    assert core.receive(ORDER, 0.3) == Moves()


def test_what_is_ordered_is_written_chunk_by_chunk_as_it_is_computed(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    assert runs(core.progress(Progress(T, "r", (1, 2), 0, 1, final=False), 0.1)) == [((1,), (21,))]
    assert runs(core.progress(Progress(T, "r", (3,), 2, 3, final=True), 0.2)) == [((2, 3), (22, 23))]


def test_without_progress_all_is_written_at_the_end() -> None:
    core = new_core(progressive=False)
    core.admit(TERMS, 0.0)
    core.receive(ORDER, 0.0)
    assert core.progress(Progress(T, "r", (1, 2), 0, 1, final=False), 0.1) == Moves()
    assert runs(core.progress(Progress(T, "r", (3,), 2, 3, final=True), 0.2)) == [((1, 2, 3), (21, 22, 23))]


def test_only_what_the_consumer_lacks_is_written(core: WritingCore) -> None:
    order = PushOrdered(
        transfer_id=T, producer_id="p", consumer_id="d", consumer_incarnation="d1", block_ids=[[23]], first_block=2,
        token_count=10, prompt_digest="x", lease_s=10.0,
    )  # fmt: skip
    core.receive(order, 0.0)
    assert runs(core.progress(WHOLE, 0.1)) == [((3,), (23,))]


def test_done_is_said_when_the_last_write_has_ended(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    (first,) = core.progress(Progress(T, "r", (1, 2, 3), 0, 1, final=False), 0.1).writes
    (second,) = core.progress(Progress(T, "r", (), 3, 3, final=True), 0.2).writes
    assert core.write_ended(second, ok=True, now_s=0.3) == Moves()
    (post,) = core.write_ended(first, ok=True, now_s=0.4).posts
    assert isinstance(post.message, PushDone)
    assert post.message.ranges == [(1, 2), (0, 1)]


def test_a_held_request_is_reported_as_sent_once_all_is_written(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    (write,) = core.progress(WHOLE, 0.1).writes
    assert core.hold(T) == Moves()
    assert core.write_ended(write, ok=True, now_s=0.2).sent == ["r"]
    assert core.pushes == {}


def test_a_write_that_fails_is_told_to_the_consumer_once(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    (write,) = core.progress(WHOLE, 0.1).writes
    (post,) = core.write_ended(write, ok=False, now_s=0.2).posts
    assert isinstance(post.message, PushFailed)
    assert core.refused(T, "again") == Moves()
    assert core.hold(T).sent == ["r"]


def test_a_cancel_is_answered_only_when_nothing_is_in_flight(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    (write,) = core.progress(WHOLE, 0.1).writes
    assert core.receive(CANCEL, 0.2) == Moves()
    assert said(core.write_ended(write, ok=True, now_s=0.3)) == [("d", "PushDone"), ("d", "PushQuiesced")]


def test_a_cancel_before_anything_is_answered_and_nothing_is_written_afterwards() -> None:
    core = new_core()
    assert said(core.receive(CANCEL, 0.0)) == [("d", "PushQuiesced")]
    assert core.receive(ORDER, 0.1) == Moves()
    core.admit(TERMS, 0.2)
    assert core.progress(WHOLE, 0.3) == Moves()
    assert core.hold(T).sent == ["r"]


def test_the_consumers_own_rank_does_not_answer_a_cancel_for_its_producer() -> None:
    assert WritingCore("d", 0, 1, 4, 1, progressive=True).receive(CANCEL, 0.0) == Moves()


def test_preempted_blocks_are_written_no_more_and_the_new_ones_are(core: WritingCore) -> None:
    core.progress(Progress(T, "r", (1, 2, 3), 0, 2, final=False), 0.1)
    assert core.preempted([T]) == set()
    assert core.receive(ORDER, 0.2) == Moves()
    again = Progress(T, "r", (7, 8, 9), 0, 3, final=True, restarted=True)
    assert runs(core.progress(again, 0.3)) == [((7, 8, 9), (21, 22, 23))]


def test_what_was_written_before_a_preemption_is_not_written_again(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    (write,) = core.progress(Progress(T, "r", (1, 2), 0, 2, final=False), 0.1).writes
    assert core.preempted([T]) == {write.write_id}
    again = Progress(T, "r", (7, 8, 9), 0, 3, final=True, restarted=True)
    assert runs(core.progress(again, 0.3)) == [((9,), (23,))]


def test_without_presence_nothing_is_written_until_it_is_back(core: WritingCore) -> None:
    core.may_write = False
    core.receive(ORDER, 0.0)
    assert core.progress(WHOLE, 0.1) == Moves()
    core.may_write = True
    assert runs(core.fire_all(0.2)) == [((1, 2, 3), (21, 22, 23))]


def test_an_order_from_before_a_lapse_of_presence_is_refused(core: WritingCore) -> None:
    core.lease = 2
    assert said(core.receive(ORDER, 0.0)) == [("d", "PushFailed")]
    assert core.progress(WHOLE, 0.1) == Moves()


def test_an_order_for_a_lease_that_we_have_not_seen_yet_waits(core: WritingCore) -> None:
    core.lease = 0
    core.progress(WHOLE, 0.1)
    core.lease, order = (
        1,
        PushOrdered(**{f: getattr(ORDER, f) for f in ORDER.__struct_fields__} | {"producer_lease": 2}),
    )
    assert core.receive(order, 0.2) == Moves()
    core.lease = 2
    assert len(core.fire_all(0.3).writes) == 1


def test_an_order_whose_lease_is_over_writes_nothing(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    assert core.progress(WHOLE, 10.0) == Moves()


def test_different_prompts_are_refused(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    other = WritingCore("p", 0, 1, 4, 100, progressive=True)
    other.admit(Terms(T, "r", 10, "y"), 0.0)
    assert said(other.receive(ORDER, 0.1)) == [("d", "PushFailed")]


def test_a_dead_consumers_request_is_reported_as_sent_and_written_no_more(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    core.hold(T)
    assert core.consumer_gone("d", "d1").sent == ["r"]
    assert core.progress(WHOLE, 0.1) == Moves()


def test_a_write_is_overdue_after_the_longest_that_it_may_take(core: WritingCore) -> None:
    core.receive(ORDER, 0.0)
    (write,) = core.progress(WHOLE, 1.0).writes
    assert core.overdue(6.0, 5.0) == set()
    assert core.overdue(6.1, 5.0) == {write.write_id}


class AnyOrder(RuleBasedStateMachine):
    """One push with everything that can happen to it, in any order and any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.core = new_core()
        self.now_s = 0.0
        self.flying: list[Write] = []
        self.written: set[int] = set()
        self.source: list[int] = []
        self.next_block = 1
        self.computed = 0
        self.admitted = self.held = False
        self.sent: list[str] = []
        self.ended = 0

    def take(self, moves: Moves) -> None:
        self.now_s += 0.1
        for write in moves.writes:
            positions = range(write.first, write.first + len(write.source_blocks))
            assert not self.written & set(positions), "a block is written twice"
            assert list(write.source_blocks) == [self.source[p] for p in positions], "not out of our own blocks"
            assert list(write.target_blocks) == [ORDER.block_ids[0][p] for p in positions]
            assert self.core.may_write
            self.written |= set(positions)
            self.core.submitted(write, self.now_s)
            self.flying.append(write)
        for post in moves.posts:
            if isinstance(post.message, PushQuiesced):
                assert not self.flying, "quiet with a WRITE in flight"
            self.ended += isinstance(post.message, PushDone | PushFailed)
        if moves.sent:
            assert self.held
            assert not self.flying, "sent with a WRITE in flight"
        self.sent += moves.sent

    @rule()
    def is_admitted(self) -> None:
        if not self.admitted:
            self.admitted = True
            self.take(self.core.admit(TERMS, self.now_s))

    @rule(message=st.sampled_from([ORDER, ORDER, CANCEL, CLOSED]))
    def hears(self, message: PushOrdered | CancelOrdered | TransferClosed) -> None:
        self.take(self.core.receive(message, self.now_s))

    @rule()
    def computes_a_block(self) -> None:
        if not self.admitted or self.held or self.computed >= 3:
            return
        restarted, first = not self.source, len(self.source)
        while len(self.source) <= self.computed:
            self.source.append(self.next_block)
            self.next_block += 1
        self.computed += 1
        progress = Progress(T, "r", tuple(self.source[first:]), first, self.computed, self.computed == 3, restarted)
        self.take(self.core.progress(progress, self.now_s))

    @rule()
    def is_preempted(self) -> None:
        if self.admitted and not self.held and self.computed < 3:
            reading = self.core.preempted([T])
            assert reading == {write.write_id for write in self.flying}
            for write in list(self.flying):
                self.ends(write, ok=True)
            self.source, self.computed = [], 0

    @rule()
    def finishes(self) -> None:
        if self.admitted and not self.held:
            self.held = True
            self.take(self.core.hold(T))

    @rule()
    def is_released(self) -> None:
        self.take(self.core.release(T))

    @rule(present=st.booleans())
    def may_or_may_not_write(self, present: bool) -> None:
        self.core.may_write = present
        self.take(self.core.fire_all(self.now_s))

    @rule(ok=st.booleans(), which=st.integers(0, 5))
    def a_write_ends(self, ok: bool, which: int) -> None:
        if self.flying:
            self.ends(self.flying[which % len(self.flying)], ok=ok)

    def ends(self, write: Write, *, ok: bool) -> None:
        self.flying.remove(write)
        self.take(self.core.write_ended(write, ok=ok, now_s=self.now_s))

    @invariant()
    def each_request_is_reported_at_most_once(self) -> None:
        assert len(self.sent) <= 1

    @invariant()
    def done_or_failed_is_said_at_most_once(self) -> None:
        assert self.ended <= 1

    def teardown(self) -> None:
        """Whatever has happened: released and with its WRITEs ended, a finished request is reported as sent."""
        self.is_admitted()
        self.finishes()
        self.is_released()
        for write in list(self.flying):
            self.ends(write, ok=True)
        assert self.sent == ["r"]
        assert T not in self.core.pushes


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
