"""An engine's scheduler side, hook by hook: what vLLM is told exactly once, what the other side hears at once, and
which requests go on without a transfer."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import StillLink, T, card, request, side_of, step, ticket

from kvbus.engine.chain import chain_of
from kvbus.engine.scheduler import SchedulerSide
from kvbus_schemas import BlocksRegistered, BlocksUnavailable, CancelOrdered, ReuseGrant, TransferClosed

PROMPT = 10
BLOCKS = ([5, 6, 7],)
CONVERSATION = "c" * 32


def decode(*, knows_prefill: bool = True) -> tuple[SchedulerSide, StillLink]:
    side, link = side_of("decode", "d0")
    if knows_prefill:
        side.seen(card("p0"))
    return side, link


def arrive(side: SchedulerSide, name: str = "r", **changes: Any) -> Any:
    """A request with a ticket for this engine comes in."""
    role = "consume" if side.identity.role == "decode" else "produce"
    asked = request(name, ticket(role, **changes).to_params())
    side.on_new_request(asked)
    return asked


def park(side: SchedulerSide, name: str = "r") -> Any:
    """A request that waits for its push."""
    asked = arrive(side, name)
    assert side.matched_tokens(asked, 0) == (PROMPT, True)
    side.allocated(asked, BLOCKS, PROMPT)
    return asked


def test_a_request_is_reported_to_vllm_once_and_a_repeat_or_a_stranger_is_taken_out() -> None:
    side, link = decode()
    park(side)
    for received in ({"r", "stranger"}, {"r"}):
        side.took(received, {"r", "stranger"})
        assert received <= {"r"}
    assert [kind for _, kind in link.told()].count("TransferClosed") == 1
    again = {"r"}
    side.took(again, None)
    assert again == set()


def test_a_prefill_in_a_reuse_may_end_both_of_its_transfers_in_one_step() -> None:
    """Consumer of the old part, producer of the new one: each report goes to the transfer that it is about."""
    side, link = side_of("prefill", "p0")
    side.seen(card("d0"))
    asked = request("r", None, tokens=100)
    offered = asked.prompt_token_ids[:80]
    grant = ReuseGrant(
        transfer_id="b" * 32, offer_id="o", holder_id="d0", holder_incarnation="i1", conversation=CONVERSATION,
        token_count=80, block_size=4, chain=chain_of(CONVERSATION, offered, 4),
    )  # fmt: skip
    asked.kv_transfer_params = ticket("produce", reuse=grant, conversation=CONVERSATION).to_params()
    side.on_new_request(asked)
    tokens, later = side.matched_tokens(asked, 0)
    assert (tokens, later) == (80, True)
    side.allocated(asked, (list(range(20)),), 80)
    received = {"r"}
    side.took(received, None)
    assert received == {"r"}
    assert side.finished(asked, (list(range(25)),)) is True
    received, sent = {"r"}, {"r"}
    side.took(received, sent)
    assert (received, sent) == (set(), {"r"})
    closed = [post.message for post in link.posted if isinstance(post.message, TransferClosed)]
    assert [(message.transfer_id, message.outcome) for message in closed] == [("b" * 32, "completed")]


def test_decode_says_at_once_that_a_request_has_ended_before_it_was_scheduled() -> None:
    side, link = decode()
    asked = arrive(side)
    assert side.finished(ended_as(asked, "FINISHED_ABORTED"), ([],)) is False
    assert link.told() == [("p0", "TransferClosed")]


def test_prefill_says_at_once_that_a_request_has_ended_before_it_was_scheduled() -> None:
    side, link = side_of("prefill", "p0")
    asked = arrive(side)
    assert side.finished(ended_as(asked, "FINISHED_ABORTED"), ([],)) is False
    assert link.told() == [("d0", "BlocksUnavailable"), ("matcher", "BlocksUnavailable")]


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED", "FINISHED_REPETITION"])
def test_a_prefill_that_ends_by_anything_but_its_length_or_a_stop_tells_its_consumer(status: str) -> None:
    side, link = side_of("prefill", "p0")
    asked = arrive(side)
    side.allocated(asked, BLOCKS, 0)
    assert side.finished(ended_as(asked, status), BLOCKS) is True  # until the ranks are quiet
    (post,) = link.posted
    assert isinstance(post.message, BlocksUnavailable)
    assert (post.to, post.message.reason) == ("d0", "aborted")
    assert side.build(step()).released == [T]


def test_a_decode_that_leaves_while_it_waits_gets_its_blocks_back_only_when_prefill_is_quiet() -> None:
    side, link = decode()
    asked = park(side)
    side.build(step())
    side.finished(ended_as(asked, "FINISHED_ABORTED"), BLOCKS)
    assert ("p0", "CancelOrdered") in link.told()
    assert side.build(step()).concluded == {}


def test_a_decode_whose_prompt_is_here_already_closes_its_transfer_at_once() -> None:
    side, link = decode()
    asked = arrive(side)
    assert side.matched_tokens(asked, PROMPT) == (0, False)
    side.allocated(asked, BLOCKS, 0)
    assert link.told() == [("p0", "TransferClosed")]


def test_a_decode_computes_by_itself_what_its_prefill_cannot_bring() -> None:
    for side, link in (decode(knows_prefill=False), decode()):
        link.up = not side.peers.cards()
        asked = arrive(side)
        assert side.matched_tokens(asked, 0) == (0, False)
    side, _ = decode()
    side.seen(card("p0", "i2"))  # started again since the ticket was made
    assert side.matched_tokens(arrive(side), 0) == (0, False)


def test_of_several_sequences_of_one_prompt_one_takes_the_push_and_the_others_ask_again() -> None:
    side, _ = decode()
    park(side, "r-0")
    others = [arrive(side, f"r-{number}") for number in (1, 2, 3)]
    assert [side.matched_tokens(other, 0) for other in others] == [(None, False)] * 3
    side.took({"r-0"}, None)
    assert [side.matched_tokens(other, 8) for other in others] == [(0, False)] * 3


def test_a_ticket_that_is_used_again_is_served_without_a_transfer() -> None:
    side, link = decode()
    park(side, "first")
    side.took({"first"}, None)
    second = arrive(side, "second")
    assert side.matched_tokens(second, 0) == (0, False)
    side.allocated(second, BLOCKS, 0)
    assert [kind for _, kind in link.told()] == ["BlocksRegistered", "TransferClosed"]


def test_the_same_request_id_twice_is_two_transfers_that_never_meet() -> None:
    """A client may send one X-Request-Id again: nothing is matched by it."""
    first, second = decode(), decode()
    for (side, _), transfer_id in ((first, T), (second, "b" * 32)):
        asked = arrive(side, "cmpl-same-0", transfer_id=transfer_id, request_id="same")
        assert side.matched_tokens(asked, 0) == (PROMPT, True)
        side.allocated(asked, BLOCKS, PROMPT)
    keys = [post.message.key for _, link in (first, second) for post in link.posted]
    assert keys == [T, "b" * 32]
    digests = {post.message.prompt_digest for _, link in (first, second) for post in link.posted
               if isinstance(post.message, BlocksRegistered)}  # fmt: skip
    assert len(digests) == 2, "even the same prompt has another digest under another transfer"


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
STOCK = ["do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_host", "remote_port", "remote_block_ids"]


@given(st.one_of(
    JSON,
    st.dictionaries(st.sampled_from(STOCK), JSON),
    st.dictionaries(st.just("kvbus"), JSON, min_size=1),
    st.builds(lambda name, value: {"kvbus": ticket("consume").to_params()["kvbus"] | {name: value}},
              st.sampled_from(sorted(ticket("consume").to_params()["kvbus"])), JSON),
))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_whatever_stands_in_the_transfer_params_no_hook_raises(params: Any) -> None:
    side, _ = decode()
    asked = request("r", params)
    side.on_new_request(asked)
    tokens, _ = side.matched_tokens(asked, 0)
    side.allocated(asked, BLOCKS, tokens or 0)
    side.build(step())
    side.finished(ended_as(asked, "FINISHED_ABORTED"), BLOCKS)
    side.hear(CancelOrdered(transfer_id=T, reason="x", source="router"))
    side.build(step())


def test_deadlines_of_all_lengths_end_each_at_its_own_time() -> None:
    side, link = side_of("prefill", "p0")
    for number, deadline_s in enumerate((90.0, 3.0, 30.0)):
        asked = arrive(side, f"r{number}", transfer_id=str(number) * 32, deadline_s=deadline_s)
        side.allocated(asked, BLOCKS, 0)
        side.finished(asked, BLOCKS)
    started_s = min(production.since_s for production in side.producer.open.values())
    ended = [[transfer[0] for transfer in side.producer.tick(started_s + after_s).released] for after_s in (4, 31, 91)]
    assert ended == [["1"], ["2"], ["0"]]
    assert [kind for _, kind in link.told()] == ["BlocksReady"] * 3


def ended_as(asked: Any, name: str) -> Any:
    asked.status = SimpleNamespace(name=name)
    return asked


def test_the_consumers_of_a_dead_prefill_go_on_without_it() -> None:
    side, link = decode()
    park(side)
    side.build(step())
    side.engine_gone("p0")
    side.build(step())
    assert ("p0", "CancelOrdered") in link.told()
    assert side.consumer.open[T].outcome == "failed"
