"""A ticket or an order that comes twice, and a consumer that dies without a word: found by `kvbus sim`."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine_world import StillLink, T, card, request, side_of, step, ticket

from kvbus.engine.chain import chain_of
from kvbus.engine.consumer import ConsumerCore
from kvbus.engine.facts import StepOrders
from kvbus.engine.peers import Peers
from kvbus.engine.scheduler import SchedulerSide
from kvbus_schemas import BlocksRegistered, CancelOrdered, PushOrdered, ReuseGrant, ReuseReleased, TransferClosed

BLOCKS = ([5, 6, 7],)
CONVERSATION = "c" * 32
RETURN = "b" * 32


def arrive(side: SchedulerSide, name: str, **changes: Any) -> Any:
    asked = request(name, ticket("produce", **changes).to_params(), tokens=100)
    side.on_new_request(asked)
    return asked


def aborted(asked: Any) -> Any:
    asked.status = SimpleNamespace(name="FINISHED_ABORTED")
    return asked


def prefill() -> tuple[SchedulerSide, StillLink]:
    side, link = side_of("prefill", "p0")
    side.seen(card("d0"))
    return side, link


@pytest.mark.parametrize("end", [aborted, lambda asked: asked], ids=["aborted", "finished"])
def test_a_repeated_leg_says_nothing_of_the_transfer_that_the_first_one_holds(end: Any) -> None:
    side, link = prefill()
    first, second = arrive(side, "first"), arrive(side, "second")
    side.allocated(first, BLOCKS, 0)
    assert side.finished(end(second), BLOCKS) is False
    assert link.posted == []


def test_of_two_legs_that_end_before_they_are_scheduled_the_last_one_says_so() -> None:
    side, link = prefill()
    first, second = arrive(side, "first"), arrive(side, "second")
    side.finished(aborted(first), ([],))
    assert link.posted == []
    side.finished(aborted(second), ([],))
    assert link.told() == [("d0", "BlocksUnavailable"), ("matcher", "BlocksUnavailable")]


def test_a_repeated_leg_lets_go_of_no_grant_that_the_first_one_uses() -> None:
    side, link = prefill()
    chain = chain_of(CONVERSATION, list(range(80)), 4)
    grant = ReuseGrant(
        transfer_id=RETURN, offer_id="o", holder_id="d0", holder_incarnation="i1", conversation=CONVERSATION,
        token_count=80, block_size=4, chain=chain,
    )  # fmt: skip
    first, second = (arrive(side, name, reuse=grant, conversation=CONVERSATION) for name in ("first", "second"))
    assert side.matched_tokens(first, 0) == (80, True)
    side.allocated(first, (list(range(20)),), 80)
    assert side.matched_tokens(second, 0) == (0, False)
    side.allocated(second, (list(range(25)),), 0)
    assert not any(isinstance(post.message, ReuseReleased) for post in link.posted)


class Pool:
    """The part of vLLM's block pool that is used."""

    blocks = range(64)

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()

    def touch(self, block_ids: list[int]) -> None:
        self.references.update(block_ids)

    def free_blocks(self, block_ids: Any) -> None:
        self.references.subtract(list(block_ids))

    def get_num_free_blocks(self) -> int:
        return 64 - len(+self.references)


def holder() -> tuple[SchedulerSide, StillLink, PushOrdered]:
    """A decode engine that keeps an offer, and the order that takes it."""
    side, link = side_of("decode", "d0")
    side.reuse.pool = Pool()
    turn = request("turn", None, tokens=80)
    turn.num_computed_tokens = 80
    side.reuse.keep(turn, CONVERSATION, list(range(20)), 0.0)
    (offer_id,) = side.reuse.retention.offers
    order = PushOrdered(
        transfer_id=RETURN, producer_id="d0", producer_incarnation="i1", consumer_id="p0", consumer_incarnation="i1",
        block_ids=[list(range(20))], first_block=0, token_count=80, prompt_digest="d", lease_s=5.0, reuse=True,
        offer_id=offer_id,
    )  # fmt: skip
    link.posted.clear()
    return side, link, order


def test_an_order_that_is_repeated_after_its_transfer_changes_nothing() -> None:
    side, link, order = holder()
    side.reuse.hear(order, StepOrders(), 1.0)
    side.reuse.quiet(Counter({RETURN: 1}))
    orders = StepOrders()
    side.reuse.hear(order, orders, 2.0)
    assert link.posted == []
    assert not orders


def test_what_is_served_ends_with_the_lease_of_its_consumer_who_may_have_died_without_a_word() -> None:
    side, _, order = holder()
    side.reuse.hear(order, StepOrders(), 1.0)
    for now_s, released in ((5.9, []), (6.0, [RETURN]), (7.0, [])):
        orders = StepOrders()
        side.reuse.tick(orders, now_s)
        assert orders.released == released


def test_an_idle_engine_that_keeps_nothing_wakes_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    side, link = side_of("decode", "d0")
    woken: list[bool] = []
    monkeypatch.setattr(side.handle, "wake_idle", lambda: woken.append(True))
    _, _, order = holder()
    side.hear(order)
    assert woken == [True]
    assert side.has_news()
    side.build(step())
    assert link.told() == [("p0", "BlocksUnavailable")]


@pytest.mark.parametrize(("failed", "outcome"), [(False, "completed"), (True, "cancelled")])
def test_what_has_landed_completely_is_completed_although_it_was_being_cancelled(failed: bool, outcome: str) -> None:
    peers = Peers()
    peers.seen(card("p0"), 0.0)
    core = ConsumerCore("d0", peers)
    registration = BlocksRegistered(
        transfer_id=T, producer_id="p0", producer_incarnation="i1", consumer_id="d0", consumer_incarnation="i1",
        block_ids=[[1, 2]], first_block=0, token_count=8, prompt_digest="d", block_size=4, consumer_tp_size=1,
        lease_s=60.0,
    )  # fmt: skip
    core.register(registration, "r", 0.0)
    core.receive(CancelOrdered(transfer_id=T, reason="r", consumer_id="d0", source="router"), 1.0)
    (post,) = core.reported("r", 2.0, failed=failed).posts
    assert isinstance(post.message, TransferClosed)
    assert post.message.outcome == outcome
