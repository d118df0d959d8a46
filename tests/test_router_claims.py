"""Claims of the router: let go when nobody takes them, kept apart by tenant, and worth a detour."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web
from tests.router_turns import HELD, ask, conversation, first_turn, held, took, trio
from tests.router_world import COMPLETION, Act, World, answered, broken, hang, status, streamed, until

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.reuse.service import ReuseService
from kvbus.reuse.settings import ReuseSettings
from kvbus_schemas import (
    ReuseAnswered,
    ReuseReleased,
    RouteDecided,
)

pytestmark = pytest.mark.nats


ID = "x-conversation-id"


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def world(nats: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats.url) as made:
        yield made


@pytest.fixture
async def reuse(nats: EmbeddedNats) -> AsyncIterator[ReuseService]:
    """A reuse process in this loop."""
    bus = await Bus.connect(BusSettings(nats=nats.url), name="reuse-1", incarnation="i")
    service = ReuseService(bus, ReuseSettings())
    await service.start()
    yield service
    await bus.close()


# Letting go


@pytest.mark.parametrize("fault", [status(500), status(400), broken])
async def test_a_claim_is_let_go_when_prefill_fails(world: World, reuse: ReuseService, fault: Act) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    offer_id = await held(reuse, decode, await first_turn(world, prefill, body))
    told = await world.inbox("d")
    prefill.act = fault
    assert (await ask(world, body)).startswith("miss reason=")
    await until(lambda: any(isinstance(message, ReuseReleased) for message in told))
    (released,) = world.said(ReuseReleased)
    assert released.offer_id == offer_id
    assert released.transfer_id == world.said(ReuseAnswered)[-1].grant.transfer_id  # type: ignore[union-attr]


async def test_a_retry_goes_without_the_claim_which_is_let_go(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    other = await world.engine("decode", "other")
    await until(lambda: len(world.router.fleet.alive("decode")) == 2)
    body = conversation()
    key = await first_turn(world, prefill, body)
    await held(reuse, decode, key)
    prefill.act = took(HELD, pause=asyncio.Event())
    failures = 0

    async def fail_once(request: web.Request) -> web.StreamResponse:
        nonlocal failures
        failures += 1
        return await (status(500) if failures == 1 else answered)(request)

    decode.act = other.act = fail_once
    assert await ask(world, body) == "miss reason=prefill_closed"
    await until(lambda: len(prefill.seen) == 3)
    assert ["reuse" in seen.ticket for seen in prefill.seen] == [False, True, False]
    assert {seen.ticket["conversation"] for seen in prefill.seen} == {key}
    assert len(await until(lambda: world.said(ReuseReleased))) == 1


@pytest.mark.parametrize("mode", ["early", "deferred"])
async def test_a_claim_is_let_go_when_the_client_leaves(world: World, reuse: ReuseService, mode: str) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body))
    prefill.act = decode.act = hang
    asking = asyncio.create_task(ask(world, body, x_kvbus_mode=mode))
    await until(lambda: len(prefill.seen) == 2)
    asking.cancel()
    assert len(await until(lambda: world.said(ReuseReleased))) == 1


async def test_a_claim_is_let_go_when_no_engine_is_left(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body))
    claim = world.router.reuse.claim

    async def claim_as_decode_leaves(turn: Any, *more: Any) -> None:
        await claim(turn, *more)
        world.router.fleet.card_gone("d", 0.0)

    world.router.reuse.claim = claim_as_decode_leaves  # type: ignore[method-assign,assignment]
    async with world.post(body) as response:
        assert response.status == 503
    assert len(await until(lambda: world.said(ReuseReleased))) == 1


# Who is who


@pytest.mark.parametrize(
    "name", ["a.b.*.>", "\u0000\r\n", "x" * 10_000, "../../etc", "\ud800".encode("utf-16", "surrogatepass").hex(), " "]
)
async def test_any_id_will_do(world: World, reuse: ReuseService, name: str) -> None:
    prefill, decode = await trio(world)
    body = COMPLETION | {"conversation_id": name + secrets.token_hex(4)}
    await held(reuse, decode, await first_turn(world, prefill, body))
    assert await ask(world, body) == f"hit tokens={HELD}"
    assert all(name not in repr(message) for message in world.messages if len(name) > 2)


async def test_two_tenants_with_one_id_never_meet(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    keys = {
        await first_turn(world, prefill, body, **headers)
        for headers in ({}, {"authorization": "Bearer one"}, {"authorization": "Bearer two"}, {"tenant": "one"})
        if headers != {"tenant": "one"}
    }
    assert len(keys) == 3
    for key in keys:
        await held(reuse, decode, key)
    for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer  two"}, {}):
        assert await ask(world, body, **headers) == f"hit tokens={HELD}"


async def test_a_configured_header_names_the_tenant(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world, tenant_header="X-Tenant")
    body = conversation()
    one = await first_turn(world, prefill, body, x_tenant="one", authorization="Bearer a")
    two = await first_turn(world, prefill, body, x_tenant="two", authorization="Bearer a")
    key = await first_turn(world, prefill, body, authorization="Bearer one")
    assert len({one, two, key}) == 3
    await held(reuse, decode, one)
    assert await ask(world, body, x_tenant="one", authorization="Bearer b") == f"hit tokens={HELD}"


async def test_our_header_names_the_conversation_and_stays_here(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    headers = {"x_conversation_id": secrets.token_hex(4)}
    await held(reuse, decode, await first_turn(world, prefill, COMPLETION, **headers))
    assert await ask(world, COMPLETION, **headers) == f"hit tokens={HELD}"
    assert all(ID not in seen.headers for engine in (prefill, decode) for seen in engine.seen)


@pytest.mark.parametrize("by_messages", [True, False])
async def test_a_chat_without_an_id_is_known_by_its_first_messages_if_wanted(
    world: World, reuse: ReuseService, by_messages: bool
) -> None:
    prefill, _ = await trio(world, reuse_by_messages=by_messages)
    first = {"role": "user", "content": secrets.token_hex(4)}
    for messages in ([first], [first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]):
        async with world.post({"messages": messages}, path="/v1/chat/completions") as response:
            assert response.headers["x-kvbus-reuse"] == f"miss reason={'new' if by_messages else 'disabled'}"
    assert len({seen.ticket.get("conversation", "") for seen in prefill.seen}) == 1


async def test_another_model_name_is_another_conversation(world: World, reuse: ReuseService) -> None:
    prefill, _ = await trio(world)
    body = conversation()
    keys = [await first_turn(world, prefill, body | {"model": name}) for name in ("tiny", "adapter")]
    assert keys[0] != keys[1]


# Where the turn goes


async def test_the_turn_goes_to_its_holder_unless_that_is_too_busy(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world, policy="least_loaded")
    other = await world.engine("decode", "other")
    await until(lambda: len(world.router.fleet.alive("decode")) == 2)
    body = conversation()
    key = await first_turn(world, prefill, body)
    prefill.act = took(2000)
    for turn, busy, expected in ((2, 1, "d"), (3, 9, "other")):
        await decode.report(running=busy)
        await other.report(running=0)
        loads = {engine.engine_id: engine for engine in world.router.fleet.alive("decode")}
        await until(lambda: loads["d"].load and loads["d"].load.running == busy and loads["other"].load)  # noqa: B023
        await held(reuse, decode, key, tokens=2000)
        assert await ask(world, body) == "hit tokens=2000"
        decided = (await until(lambda: (said := world.said(RouteDecided))[turn - 1 :] and said))[-1]  # noqa: B023
        assert decided.decode_id == expected
        terms = {candidate.engine_id: candidate.terms for candidate in decided.candidates}
        assert terms["d"]["held_tokens"] == 2.0
        assert "held_tokens" not in terms["other"]


async def test_a_stream_says_it_too(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    decode.act = streamed(b"data: one\n\n", b"data: [DONE]\n\n")
    body = conversation() | {"stream": True}
    await held(reuse, decode, await first_turn(world, prefill, body))
    assert await ask(world, body) == f"hit tokens={HELD}"
