"""The consumer core: registers, waits, drains, and says exactly one last word per transfer."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.engine.consumer import REGISTER_AGAIN_S, REPEAT_S, ConsumerCore, State, Steps
from kvbus.engine.peers import FENCE_S, Peers
from kvbus_schemas import (
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    Message,
    Post,
    PushDone,
    PushFailed,
    PushQuiesced,
    TransferClosed,
)

T, REQUEST, LEASE_S = "a" * 32, "r1", 10.0
CARD = EngineCard(
    engine_id="p", incarnation="p1", role="prefill", model="m", http_url="u", block_size=4, num_blocks=9, tp_size=2
)
REGISTRATION = BlocksRegistered(
    transfer_id=T, producer_id="p", producer_incarnation="p1", consumer_id="d", consumer_incarnation="d1",
    block_ids=[[1, 2]], first_block=0, token_count=8, prompt_digest="x", block_size=4, lease_s=LEASE_S,
)  # fmt: skip


def quiesced(rank: int, *, producer_id: str = "p", incarnation: str = "p1") -> PushQuiesced:
    return PushQuiesced(
        transfer_id=T, producer_id=producer_id, consumer_id="d", rank=rank, ranks=2, state="finished",
        incarnation=incarnation,
    )  # fmt: skip


def done(rank: int) -> PushDone:
    return PushDone(
        transfer_id=T, producer_id="p", consumer_id="d", rank=rank, ranks=2, ranges=[(0, 2)], bytes=1, duration_ms=1.0,
        incarnation="p1",
    )  # fmt: skip


FAILED = PushFailed(transfer_id=T, producer_id="p", consumer_id="d", rank=0, reason="write_failed", incarnation="p1")
UNAVAILABLE = BlocksUnavailable(transfer_id=T, producer_id="p", reason="aborted")
CANCEL = CancelOrdered(transfer_id=T, reason="client_left", source="router")


def cancel_to_producer(reason: str) -> Post:
    return Post("p", CancelOrdered(transfer_id=T, reason=reason, consumer_id="d"))


@pytest.fixture
def core() -> ConsumerCore:
    peers = Peers()
    peers.seen(CARD, 0.0)
    core = ConsumerCore("d", peers)
    assert core.register(REGISTRATION, REQUEST, 0.0) == Steps([Post("matcher", REGISTRATION)])
    return core


def closed(core: ConsumerCore, now_s: float = 1.0) -> tuple[str, str]:
    """What the last word is once the ranks have given the request back."""
    (post,) = core.reported(REQUEST, now_s).posts
    assert isinstance(post.message, TransferClosed)
    assert post.to == "p"
    return post.message.outcome, post.message.reason


def test_a_request_that_is_reported_closes_as_completed(core: ConsumerCore) -> None:
    assert closed(core) == ("completed", "")
    assert core.open == {}


def test_all_ranks_done_hints_and_nothing_else(core: ConsumerCore) -> None:
    assert core.receive(done(0), 0.1) == Steps()
    assert core.receive(done(0), 0.1) == Steps()
    assert core.receive(done(1), 0.2) == Steps(hinted=[T])


@pytest.mark.parametrize(
    ("message", "outcome", "reason"),
    [
        (FAILED, "failed", "rank 0: write_failed"),
        (UNAVAILABLE, "failed", "producer: aborted"),
        (CANCEL, "cancelled", "client_left"),
    ],
)
def test_an_end_is_told_to_the_producer_and_waits_for_every_rank_to_be_quiet(
    core: ConsumerCore, message: Message, outcome: str, reason: str
) -> None:
    assert core.receive(message, 0.5) == Steps([cancel_to_producer(reason)])
    assert core.receive(message, 0.6) == Steps()
    assert core.receive(quiesced(0), 0.7) == Steps()
    assert core.receive(quiesced(1), 0.8) == Steps(conclude={REQUEST: True})
    assert core.receive(quiesced(1), 0.9) == Steps()
    assert closed(core) == (outcome, reason)


def test_one_rank_that_is_quiet_twice_is_one_rank(core: ConsumerCore) -> None:
    core.receive(FAILED, 0.1)
    assert [core.receive(quiesced(0), 0.2) for _ in range(3)] == [Steps(), Steps(), Steps()]


@pytest.mark.parametrize("stranger", [quiesced(1, producer_id="d", incarnation="d1"), quiesced(1, incarnation="p2")])
def test_a_strangers_or_a_later_incarnations_quiet_counts_for_nothing(core: ConsumerCore, stranger: Message) -> None:
    core.receive(FAILED, 0.1)
    core.receive(quiesced(0), 0.2)
    assert core.receive(stranger, 0.3) == Steps()
    assert core.open[T].state is State.DRAINING


def test_an_aborted_request_is_given_back_without_a_failure(core: ConsumerCore) -> None:
    assert core.aborted(REQUEST, 0.1) == Steps([cancel_to_producer("the client left")])
    core.receive(quiesced(0), 0.2)
    assert core.receive(quiesced(1), 0.2) == Steps(conclude={REQUEST: False})
    assert closed(core) == ("cancelled", "the client left")


def test_a_cancel_that_is_not_answered_is_said_again(core: ConsumerCore) -> None:
    core.receive(CANCEL, 0.0)
    assert core.tick(REPEAT_S / 2) == Steps()
    assert core.tick(REPEAT_S) == Steps([cancel_to_producer("client_left")])
    assert core.tick(2 * REPEAT_S) == Steps([cancel_to_producer("client_left")])


def test_a_registration_that_brings_nothing_is_said_again_with_what_is_left_of_its_lease(core: ConsumerCore) -> None:
    again = msgspec.structs.replace(REGISTRATION, lease_s=LEASE_S - REGISTER_AGAIN_S)
    assert core.tick(REGISTER_AGAIN_S) == Steps([Post("matcher", again)])


def test_a_deadline_that_passes_expires_the_transfer(core: ConsumerCore) -> None:
    core.receive(done(0), 0.1)
    assert core.tick(LEASE_S) == Steps([cancel_to_producer("no push within the deadline")])
    core.receive(quiesced(0), LEASE_S)
    core.receive(quiesced(1), LEASE_S)
    assert closed(core)[0] == "expired"


def test_a_dead_producers_blocks_come_back_only_after_its_longest_write(core: ConsumerCore) -> None:
    core.peers.gone("p", 1.0)
    assert core.producer_gone("p", "p1", 1.0) == Steps([cancel_to_producer("prefill p is gone")])
    assert not core.tick(1.0 + FENCE_S - 0.01).conclude
    assert core.tick(1.0 + FENCE_S).conclude == {REQUEST: True}


def test_a_producer_that_comes_back_in_time_is_not_fenced(core: ConsumerCore) -> None:
    core.peers.gone("p", 1.0)
    core.producer_gone("p", "p1", 1.0)
    core.peers.seen(CARD, 2.0)
    assert not core.tick(1.0 + FENCE_S).conclude


def test_the_end_of_another_incarnation_changes_nothing(core: ConsumerCore) -> None:
    assert core.producer_gone("p", "p0", 1.0) == Steps()


def test_a_skipped_ticket_closes_at_once_and_once() -> None:
    core = ConsumerCore("d", Peers())
    (post,) = core.skip(T, "p", "here already").posts
    assert isinstance(post.message, TransferClosed)
    assert core.skip(T, "p", "here already") == Steps()
    assert core.knows(T)


EVENTS = st.lists(
    st.sampled_from(
        ["done0", "done1", "failed", "unavailable", "cancel", "quiet0", "quiet1", "stranger", "abort", "gone", "tick"]
    ),
    max_size=25,
)


SAID: dict[str, Message] = {
    "done0": done(0), "done1": done(1), "failed": FAILED, "unavailable": UNAVAILABLE, "cancel": CANCEL,
    "quiet0": quiesced(0), "quiet1": quiesced(1), "stranger": quiesced(1, incarnation="p2"),
}  # fmt: skip


def play(core: ConsumerCore, event: str, now_s: float) -> Steps:
    match event:
        case "abort":
            return core.aborted(REQUEST, now_s)
        case "gone":
            core.peers.gone("p", now_s)
            return core.producer_gone("p", "p1", now_s)
        case "tick":
            return core.tick(now_s)
        case _:
            return core.receive(SAID[event], now_s)


def ends(events: list[str]) -> tuple[set[str], int, int, bool]:
    """After these events and then every quiet: outcomes, conclusions, last words, whether anything is left open."""
    peers = Peers()
    peers.seen(CARD, 0.0)
    core = ConsumerCore("d", peers)
    core.register(REGISTRATION, REQUEST, 0.0)
    concluded, last_words, now_s = 0, 0, 0.0
    outcomes: set[str] = set()
    quiet: set[str] = set()
    fenced_s = float("inf")
    for event in [*events, "cancel", "quiet0", "quiet1"]:
        now_s += 0.5
        if event == "gone" and fenced_s == float("inf"):
            fenced_s = now_s + FENCE_S
        quiet.add(event)
        steps = play(core, event, now_s)
        concluded += len(steps.conclude)
        if steps.conclude:
            assert {"quiet0", "quiet1"} <= quiet or now_s >= fenced_s, "blocks came back while a rank was not quiet"
            for post in core.reported(REQUEST, now_s).posts:
                assert isinstance(post.message, TransferClosed)
                outcomes.add(post.message.outcome)
                last_words += 1
            assert core.reported(REQUEST, now_s) == Steps()
    return outcomes, concluded, last_words, bool(core.open)


@given(EVENTS)
@settings(max_examples=300, deadline=None)
def test_any_order_and_duplication_ends_in_one_conclusion_and_one_last_word(events: list[str]) -> None:
    outcomes, concluded, last_words, is_open = ends(events)
    assert (concluded, last_words, is_open) == (1, 1, False)
    assert outcomes <= {"failed", "cancelled", "expired"}


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_every_event_twice_ends_like_every_event_once(events: list[str]) -> None:
    events = [event for event in events if event not in ("tick", "gone")]  # they depend on the time, which differs
    assert ends(events) == ends([event for event in events for _ in (0, 1)])
