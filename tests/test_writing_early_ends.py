"""Ends that overtake the request: a producer rank holds nothing for a transfer that was over before it began."""

import pytest

from kvbus.engine.facts import Progress, Terms
from kvbus.engine.writing import WritingCore
from kvbus_schemas import CancelOrdered, Message, Post, PushOrdered, PushQuiesced, TransferClosed

WHOLE = "a" * 32
PART = f"{WHOLE}-0123456789abcdef"


@pytest.fixture
def core() -> WritingCore:
    return WritingCore("p", 0, 1, block_size=4, block_bytes=64, progressive=True)


def closed(transfer_id: str) -> Message:
    return TransferClosed(transfer_id=transfer_id, producer_id="p", consumer_id="d", outcome="completed")


def cancelled(transfer_id: str) -> Message:
    return CancelOrdered(transfer_id=transfer_id, reason="client_left", consumer_id="d")


def ordered(transfer_id: str) -> Message:
    return PushOrdered(
        transfer_id=transfer_id, producer_id="p", consumer_id="d", consumer_incarnation="i", block_ids=[[7]],
        first_block=0, token_count=3, prompt_digest="x", lease_s=60.0,
    )  # fmt: skip


def computed(core: WritingCore, transfer_id: str) -> list[str]:
    """The request runs from its first block to its end; returns what is reported as sent by then."""
    core.admit(Terms(transfer_id, "r1", 3, "x"), 1.0)
    moves = core.progress(Progress(transfer_id, "r1", (2,), 0, 1, final=True), 1.1)
    moves.add(core.hold(transfer_id))
    assert not moves.writes
    return moves.sent


@pytest.mark.parametrize("transfer_id", [WHOLE, PART])
def test_a_close_that_came_before_the_request_lets_its_blocks_go_at_its_end(
    core: WritingCore, transfer_id: str
) -> None:
    core.receive(closed(transfer_id), 0.0)
    assert computed(core, transfer_id) == ["r1"]


@pytest.mark.parametrize("name", [WHOLE, PART])
def test_a_cancel_that_came_before_the_request_lets_its_blocks_go_at_its_end(core: WritingCore, name: str) -> None:
    core.receive(cancelled(name), 0.0)
    assert computed(core, PART) == ["r1"]


def test_a_close_of_one_part_leaves_the_others_alone(core: WritingCore) -> None:
    core.receive(closed(PART), 0.0)
    assert computed(core, f"{WHOLE}-fedcba9876543210") == []


def test_cancelling_the_whole_quiesces_every_part_of_it(core: WritingCore) -> None:
    core.admit(Terms(PART, "r1", 3, "x"), 0.0)
    core.admit(Terms("b" * 32, "r2", 3, "x"), 0.0)
    core.hold(PART)
    moves = core.receive(cancelled(WHOLE), 0.1)
    said = {
        post.message.key for post in moves.posts if isinstance(post, Post) and isinstance(post.message, PushQuiesced)
    }
    assert (moves.sent, said) == (["r1"], {PART, WHOLE})
    assert set(core.pushes) == {"b" * 32}


def test_an_order_that_comes_after_the_close_writes_nothing(core: WritingCore) -> None:
    core.receive(closed(WHOLE), 0.0)
    assert not core.receive(ordered(WHOLE), 0.1).writes
    assert computed(core, WHOLE) == ["r1"]
