"""A peer whose card lapses while something is written to it: the WRITE is broken off and every other one goes on."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.engine_world import BLOCK_SIZE, HandPlane, StillLink, T, card, until

from kvbus.engine.facts import Progress, StepOrders, Terms
from kvbus.engine.landing import LandingCore
from kvbus.engine.rank import RankSide
from kvbus.engine.writing import WritingCore
from kvbus_schemas import CancelOrdered, PushOrdered

ORDER = PushOrdered(
    transfer_id=T, producer_id="p0", producer_lease=1, consumer_id="d0", consumer_incarnation="i1",
    block_ids=[[21, 22, 23]], first_block=0, token_count=10, prompt_digest="x", lease_s=60.0,
)  # fmt: skip
OTHER = replace(ORDER, transfer_id="b" * 32, consumer_id="d1")


class NixlPlane(HandPlane):
    """Forgets as NIXL does: who asks after a WRITE to a peer that was forgotten gets an exception, each time."""

    def __init__(self, *, abortable: bool = True) -> None:
        super().__init__()
        self.abortable = abortable
        self.aborted: list[int] = []

    def poll(self, handles: list[int]) -> str:
        for handle in handles:
            to = self.submitted[handle - 1]
            if (to.consumer_id, to.consumer_incarnation) in self.left:
                raise RuntimeError("remote agent was invalidated or re-registered during transfer")
        return self.state

    def abort(self, handles: list[int]) -> bool:
        self.aborted += handles
        if self.abortable:
            handles.clear()
        return self.abortable


class World:
    def __init__(self, plane: NixlPlane) -> None:
        self.plane, self.link = plane, StillLink("p0")
        writing = WritingCore("p0", 0, 1, BLOCK_SIZE, 100, progressive=True)
        self.rank = RankSide(self.plane, writing, LandingCore(0, 1), self.link)
        self.sent: set[str] = set()

    def hand_over(self, order: PushOrdered, request_id: str) -> None:
        self.rank.hear(order)
        progress = Progress(order.transfer_id, request_id, (1, 2, 3), 0, 3, final=True)
        terms = Terms(order.transfer_id, request_id, 10, "x")
        self.rank.step(StepOrders(admitted=[terms], progress=[progress], held=[order.transfer_id]), None)

    def is_sent(self, request_id: str) -> bool:
        self.sent |= self.rank.results(StepOrders())[0]
        return request_id in self.sent


@pytest.fixture(params=[True, False], ids=["abortable", "not abortable at once"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(NixlPlane(abortable=request.param))
    made.plane.up |= {("d0", "i1"), ("d1", "i1")}
    made.rank.start()
    made.rank.seen(card("d0"))
    made.rank.seen(card("d1"))
    yield made
    made.rank.stop()


def test_a_write_to_a_peer_that_has_gone_ends_and_holds_up_no_other(world: World) -> None:
    """Found by `kvbus chaos` (a decode stopped for longer than its lease): prefill's rank asked after that WRITE for
    ever, so that nothing of it was ever written or quiet again."""
    world.hand_over(ORDER, "r0")
    until(lambda: world.plane.submitted)
    world.rank.gone("d0")
    world.hand_over(OTHER, "r1")
    until(lambda: len(world.plane.submitted) == 2)
    world.plane.state = "done"
    until(lambda: world.is_sent("r1"))
    world.plane.abortable = True
    until(lambda: world.is_sent("r0"))


def test_a_peer_that_has_gone_is_told_quiet_only_when_its_write_is_broken_off(world: World) -> None:
    world.hand_over(ORDER, "r0")
    until(lambda: world.plane.submitted)
    world.rank.gone("d0")
    world.rank.hear(CancelOrdered(transfer_id=T, reason="no push", consumer_id="d0"))
    until(lambda: world.plane.aborted)
    if not world.plane.abortable:
        assert ("d0", "PushQuiesced") not in world.link.told()
    world.plane.abortable = True
    until(lambda: ("d0", "PushQuiesced") in world.link.told())
