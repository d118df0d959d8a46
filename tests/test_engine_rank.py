"""One rank with its thread, on a data plane by hand: handshakes that fail or are late, WRITEs that cannot be posted,
peers that go and come back. Whatever goes wrong is told to the consumer at once, and nothing is written after it."""

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.engine_world import BLOCK_SIZE, HandPlane, StillLink, T, card, until

from kvbus.engine.facts import Progress, StepOrders, Terms, landing_note
from kvbus.engine.landing import LandingCore
from kvbus.engine.rank import RankSide
from kvbus.engine.writing import WritingCore
from kvbus_schemas import CancelOrdered, PushFailed, PushOrdered

ORDER = PushOrdered(
    transfer_id=T, producer_id="p0", producer_lease=1, consumer_id="d0", consumer_incarnation="i1",
    block_ids=[[21, 22, 23]], first_block=0, token_count=10, prompt_digest="x", lease_s=60.0,
)  # fmt: skip
COMPUTED = StepOrders(
    admitted=[Terms(T, "r", 10, "x")],
    progress=[Progress(T, "r", (1, 2, 3), 0, 3, final=True)],
    held=[T],
)
LETTING_GO_S = 0.4


class World:
    def __init__(self) -> None:
        self.plane, self.link = HandPlane(), StillLink("p0")
        writing = WritingCore("p0", 0, 1, BLOCK_SIZE, 100, progressive=True)
        self.rank = RankSide(self.plane, writing, LandingCore(0, 1), self.link)
        self.sent: set[str] = set()

    def failures(self) -> list[PushFailed]:
        return [post.message for post in self.link.posted if isinstance(post.message, PushFailed)]

    def is_sent(self) -> bool:
        self.sent |= self.rank.results(StepOrders())[0]
        return self.sent == {"r"}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.rank.start()
    yield made
    made.rank.stop()


def order_and_compute(world: World, order: PushOrdered = ORDER) -> None:
    world.rank.hear(order)
    world.rank.step(COMPUTED, None)


def test_a_handshake_that_fails_is_told_to_the_consumer_and_the_blocks_come_back(world: World) -> None:
    world.rank.seen(card("d0"))
    order_and_compute(world)
    until(lambda: world.plane.asked)
    world.plane.shake("no route to host")
    until(world.failures)
    assert "no route to host" in world.failures()[0].detail
    until(world.is_sent)
    assert world.plane.submitted == []


def test_a_handshake_that_outlives_the_consumers_lease_writes_nothing(world: World) -> None:
    world.rank.seen(card("d0"))
    order_and_compute(world, replace(ORDER, lease_s=LETTING_GO_S))
    time.sleep(LETTING_GO_S * 1.5)
    world.plane.shake()
    until(world.failures)
    until(world.is_sent)
    assert world.plane.submitted == []


def test_what_waited_for_a_handshake_is_written_when_it_is_there(world: World) -> None:
    world.rank.seen(card("d0"))
    order_and_compute(world)
    until(lambda: world.plane.asked)
    world.plane.shake()
    until(lambda: world.plane.submitted)
    world.plane.state = "done"
    until(world.is_sent)
    assert world.link.told() == [("d0", "PushDone")]


def test_a_write_that_cannot_be_posted_is_told_to_the_consumer(world: World) -> None:
    world.plane.up.add(("d0", "i1"))
    world.plane.broken = "NIXL_ERR_INVALID_PARAM"
    order_and_compute(world)
    until(world.failures)
    assert "NIXL_ERR_INVALID_PARAM" in world.failures()[0].detail
    until(world.is_sent)


def test_a_write_that_fails_under_way_is_told_to_the_consumer(world: World) -> None:
    world.plane.up.add(("d0", "i1"))
    order_and_compute(world)
    until(lambda: world.plane.submitted)
    assert world.failures() == []
    world.plane.state = "failed"
    until(world.failures)
    until(world.is_sent)


def test_a_rank_whose_engine_is_not_seen_on_the_bus_submits_nothing(world: World) -> None:
    world.plane.up.add(("d0", "i1"))
    world.link.fresh = False
    order_and_compute(world)
    world.rank.seen(card("d0"))
    time.sleep(0.2)
    assert world.plane.submitted == []
    world.link.fresh = True
    world.rank.seen(card("d0"))  # a peer renews its card
    until(lambda: world.plane.submitted)


def test_nothing_is_quiet_while_a_write_is_in_flight(world: World) -> None:
    """A WRITE that is on its way when its consumer cancels cannot land in blocks that were given back: the consumer
    waits for this word."""
    world.plane.up.add(("d0", "i1"))
    order_and_compute(world)
    until(lambda: world.plane.submitted)
    world.rank.hear(CancelOrdered(transfer_id=T, reason="client_left", consumer_id="d0", source="d0"))
    time.sleep(0.2)
    assert world.link.told() == []
    world.plane.state = "done"
    until(lambda: ("d0", "PushQuiesced") in world.link.told())


def test_a_peer_that_is_gone_is_let_go_of_at_once_with_its_memory(world: World) -> None:
    world.rank.seen(card("d0"))
    until(lambda: world.plane.asked)
    world.plane.shake()
    order_and_compute(world)
    until(lambda: world.plane.submitted)
    world.plane.state = "done"
    world.rank.gone("d0")
    until(lambda: world.plane.left)
    assert world.plane.left == [("d0", "i1")]
    until(world.is_sent)


def test_a_peer_that_comes_back_under_its_name_is_met_anew_and_the_old_one_forgotten(world: World) -> None:
    world.rank.seen(card("d0"))
    until(lambda: world.plane.asked)
    world.plane.shake()
    world.rank.seen(card("d0", "i2"))
    until(lambda: world.plane.asked)
    world.plane.shake()
    until(lambda: world.plane.left)
    assert (world.plane.left, world.plane.up) == ([("d0", "i1")], {("d0", "i2")})
    order_and_compute(world, replace(ORDER, lease_s=LETTING_GO_S))  # of the old incarnation, still on its way
    until(world.is_sent)
    assert world.plane.submitted == []


def test_notes_of_others_are_passed_over(world: World) -> None:
    world.plane.notes_in = [b"HB:1,2", b"\xff\xfe", b"cmpl-x:1", landing_note(T, 0, 0, 3).encode() + b":1"]
    world.rank._read_notes()
    assert list(world.rank.landing.early) == [T]
