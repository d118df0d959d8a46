"""The producer core: holds what is finished until every rank has let go, and tells at once what will not come."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbus.engine.facts import Terms
from kvbus.engine.producer import ProducerCore, ProducerSteps
from kvbus_schemas import BlocksReady, BlocksUnavailable, CancelOrdered, Message, Post, Ticket, TransferClosed

T, REQUEST = "a" * 32, "r1"
TERMS = Terms(T, REQUEST, 7, "x")
TICKET = Ticket(
    transfer_id=T, role="produce", mode="early", producer_id="p", consumer_id="d", consumer_incarnation="d1",
    deadline_s=10.0,
)  # fmt: skip
CLOSED = TransferClosed(transfer_id=T, producer_id="p", consumer_id="d", outcome="completed")
CANCEL = CancelOrdered(transfer_id=T, reason="client_left")


@pytest.fixture
def core() -> ProducerCore:
    core = ProducerCore("p", 4)
    assert core.admit(TICKET, TERMS, 0.0) == ProducerSteps(admitted=[TERMS])
    return core


def finish(core: ProducerCore, *, ok: bool = True, now_s: float = 1.0) -> ProducerSteps:
    return core.finished(REQUEST, ok=ok, block_ids=[[1, 2]], cached_tokens=4, now_s=now_s)


def unavailable(reason: str) -> tuple[str, str]:
    return ("d", reason)


def told(steps: ProducerSteps) -> list[tuple[str, str]]:
    return [(post.to, post.message.reason) for post in steps.posts if isinstance(post.message, BlocksUnavailable)]


def test_a_finished_request_is_ready_and_held(core: ProducerCore) -> None:
    ready = BlocksReady(
        transfer_id=T, producer_id="p", consumer_id="d", block_ids=[[1, 2]], token_count=7, prompt_digest="x",
        lease_s=9.0, computed_ms=1000.0, cached_tokens=4, block_size=4,
    )  # fmt: skip
    assert finish(core) == ProducerSteps(posts=[Post("matcher", ready)], held=[T])
    assert core.holding()


def test_a_ticket_that_is_used_again_is_ignored(core: ProducerCore) -> None:
    assert core.admit(TICKET, Terms(T, "r2", 7, "x"), 0.5) == ProducerSteps()
    finish(core)
    core.reported(REQUEST)
    assert core.admit(TICKET, Terms(T, "r3", 7, "x"), 0.5) == ProducerSteps()


@pytest.mark.parametrize("message", [CLOSED, CANCEL])
def test_the_consumers_last_word_and_a_cancel_release(core: ProducerCore, message: Message) -> None:
    finish(core)
    assert core.receive(message) == ProducerSteps(held=[T], released=[T])
    assert core.receive(message) == ProducerSteps()


def test_what_is_released_while_it_computes_is_released_when_it_has_finished(core: ProducerCore) -> None:
    assert core.receive(CANCEL) == ProducerSteps(released=[T])
    steps = finish(core)
    assert (steps.held, steps.released) == ([T], [T])


def test_an_aborted_request_is_told_to_its_consumer_at_once(core: ProducerCore) -> None:
    steps = finish(core, ok=False)
    assert told(steps) == [unavailable("aborted")]
    assert (steps.held, steps.released) == ([T], [T])


def test_what_nobody_fetched_within_the_deadline_is_given_up_once(core: ProducerCore) -> None:
    finish(core)
    assert core.tick(9.9) == ProducerSteps()
    assert told(core.tick(10.0)) == [unavailable("expired")]
    assert core.tick(11.0) == ProducerSteps()


def test_a_dead_consumer_releases_its_transfers_and_no_others(core: ProducerCore) -> None:
    finish(core)
    assert core.consumer_gone("d", "d0") == ProducerSteps()
    assert core.consumer_gone("other", "d1") == ProducerSteps()
    assert core.consumer_gone("d", "d1") == ProducerSteps(held=[T], released=[T])


def test_a_deferred_consumer_is_known_by_its_order(core: ProducerCore) -> None:
    core.consumer_known(T, "d2", "i2")
    finish(core)
    assert core.consumer_gone("d", "d1") == ProducerSteps()
    assert core.consumer_gone("d2", "i2").released == [T]


def test_unknown_transfers_and_requests_change_nothing(core: ProducerCore) -> None:
    assert core.receive(CancelOrdered(transfer_id="b" * 32, reason="x")) == ProducerSteps()
    core.reported("r9")
    assert core.by_request == {REQUEST: T}


class AnyOrder(RuleBasedStateMachine):
    """One request from admission to its report, with anything in between, any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.core = ProducerCore("p", 4)
        self.core.admit(TICKET, TERMS, 0.0)
        self.now_s = 0.0
        self.finished = self.gone = False
        self.held = self.released = 0
        self.given_up = 0

    def take(self, steps: ProducerSteps) -> None:
        self.held += len(steps.held)
        self.released += len(steps.released)
        self.given_up += len(told(steps))

    @rule(message=st.sampled_from([CLOSED, CANCEL]))
    def hears(self, message: Message) -> None:
        self.take(self.core.receive(message))

    @rule(seconds=st.floats(0.1, 6.0))
    def ticks(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.core.tick(self.now_s))

    @rule()
    def loses_its_consumer(self) -> None:
        self.take(self.core.consumer_gone("d", "d1"))

    @rule(ok=st.booleans())
    def finishes(self, ok: bool) -> None:
        if not self.finished:
            self.finished = True
            self.take(finish(self.core, ok=ok, now_s=self.now_s))

    @rule()
    def is_reported(self) -> None:
        if self.finished and self.held:
            self.gone = True
            self.core.reported(REQUEST)

    @rule()
    def is_admitted_again(self) -> None:
        assert self.core.admit(TICKET, TERMS, self.now_s) == ProducerSteps()

    @invariant()
    def what_has_finished_is_held_until_it_is_reported(self) -> None:
        assert bool(self.held) == self.finished
        assert (T in self.core.open) != self.gone

    @invariant()
    def giving_up_is_said_at_most_once_for_each_reason(self) -> None:
        assert self.given_up <= 2


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
