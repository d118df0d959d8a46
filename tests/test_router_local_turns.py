"""Turns that a decode computes by itself: it is told whose they are, so that it keeps them."""

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.router_turns import ask, conversation, trio
from tests.router_world import COMPLETION, World

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.reuse.service import ReuseService
from kvbus.reuse.settings import ReuseSettings

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def world(nats: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats.url) as made:
        yield made


@pytest.fixture
async def reuse(nats: EmbeddedNats) -> AsyncIterator[None]:
    """A reuse process in this loop."""
    bus = await Bus.connect(BusSettings(nats=nats.url), name="reuse-1", incarnation="i")
    await ReuseService(bus, ReuseSettings()).start()
    yield
    await bus.close()


async def test_a_turn_in_mode_local_names_its_conversation_to_decode(world: World, reuse: None) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    assert await ask(world, body, x_kvbus_mode="early") == "miss reason=new"
    assert await ask(world, body, x_kvbus_mode="local") == "miss reason=disabled"
    early, local = decode.seen[0].ticket, decode.seen[1].ticket
    assert local["conversation"] == early["conversation"]
    assert (local["mode"], local["role"], local["producer_id"]) == ("local", "consume", "")
    assert (local["consumer_id"], local["consumer_incarnation"]) == ("d", decode.incarnation)
    assert local["transfer_id"] != early["transfer_id"]
    assert len(prefill.seen) == 1


async def test_without_a_conversation_or_a_prefill_a_local_request_is_passed_on_as_it_is(
    world: World, reuse: None
) -> None:
    decode = await world.engine("decode", "d")
    await world.start()
    await ask(world, conversation())
    assert "kv_transfer_params" not in decode.seen[-1].body
    await world.engine("prefill", "p")
    await ask(world, COMPLETION, x_kvbus_mode="local")
    assert "kv_transfer_params" not in decode.seen[-1].body
