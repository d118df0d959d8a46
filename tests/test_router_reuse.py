"""Conversations through the router: real NATS, a real reuse process, engines that do as they are told."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from time import monotonic
from typing import Any

import pytest
from aiohttp import web
from tests.router_world import COMPLETION, Act, Engine, World, answered, broken, hang, status, streamed, until

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.reuse.service import ReuseService
from kvbus.reuse.settings import ReuseSettings
from kvbus_schemas import (
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    RouteDecided,
)

pytestmark = pytest.mark.nats

HELD = 96
ID = "x-conversation-id"
PATIENT_MS = 5000.0
_offers = itertools.count(1)


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


def conversation() -> dict[str, Any]:
    return COMPLETION | {"conversation_id": secrets.token_hex(8)}


def took(tokens: int, outcome: str = "hit", pause: asyncio.Event | None = None) -> Act:
    """A prefill that says what it took over."""

    async def act(request: web.Request) -> web.StreamResponse:
        if pause is not None:
            await pause.wait()
        said = {"kvbus": {"reused_tokens": tokens, "reuse": outcome}}
        return web.json_response({"choices": [], "kv_transfer_params": said, "url": str(request.url)})

    return act


async def offer(engine: Engine, key: str, *, tokens: int = HELD, remaining_s: float = 60.0) -> str:
    """The engine keeps a turn; the offer's id."""
    assert engine.bus is not None
    offer_id = secrets.token_hex(4)
    message = ReuseOffered(
        conversation=key,
        offer_id=offer_id,
        offer_seq=next(_offers),
        engine_id=engine.engine_id,
        block_count=tokens // 16,
        block_size=16,
        token_count=tokens,
        chain=[b"x" * 8] * (tokens // 16),
        remaining_s=remaining_s,
    )
    await engine.bus.publish(message, "reuse")
    return offer_id


async def ask(world: World, body: object, **headers: str) -> str:
    """X-Kvbus-Reuse of an answer that is right."""
    async with world.post(body, **headers) as response:
        assert response.status == 200
        await response.read()
        return response.headers["x-kvbus-reuse"]


async def trio(world: World, **settings: Any) -> tuple[Engine, Engine]:
    """A prefill, a decode and their router."""
    prefill, decode = await world.engine("prefill", "p"), await world.engine("decode", "d")
    await world.start(reuse_ask_ms=PATIENT_MS, **settings)
    prefill.act = took(HELD)
    return prefill, decode


async def first_turn(world: World, prefill: Engine, body: object, **headers: str) -> str:
    """The conversation's key, learnt from the ticket of its first turn."""
    assert await ask(world, body, **headers) == "miss reason=new"
    key: str = prefill.seen[-1].ticket["conversation"]
    assert len(key) == 32
    return key


async def held(reuse: ReuseService, engine: Engine, key: str, **given: Any) -> str:
    """The engine offers the turn, and the reuse process has heard it."""
    before = reuse.counters.total()
    offer_id = await offer(engine, key, **given)
    await until(lambda: reuse.counters.total() > before)
    return offer_id


async def test_the_next_turn_takes_its_blocks_along_and_the_answer_says_so(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    key = await first_turn(world, prefill, body)
    assert decode.seen[0].ticket["conversation"] == key
    offer_id = await held(reuse, decode, key)
    assert await ask(world, body) == f"hit tokens={HELD}"
    grant = prefill.seen[1].ticket["reuse"]
    assert (grant["holder_id"], grant["holder_incarnation"], grant["offer_id"]) == ("d", decode.incarnation, offer_id)
    assert grant["token_count"] == HELD
    assert "reuse" not in decode.seen[1].ticket
    await until(lambda: len(world.said(RequestServed)) == 2)
    assert {decided.conversation for decided in world.said(RouteDecided)} == {key}
    assert {served.conversation for served in world.said(RequestServed)} == {key}
    assert not world.said(ReuseReleased)
    text = await metrics(world)
    assert 'kvbus_reuse_total{reason="",result="hit"} 1.0' in text
    assert 'kvbus_reuse_total{reason="new",result="miss"} 1.0' in text
    assert f"kvbus_reuse_tokens_total {HELD}.0" in text


async def metrics(world: World) -> str:
    await asyncio.sleep(0.05)
    async with world.http.get(world.router.url + "/metrics") as response:
        return await response.text()


async def test_held_blocks_are_a_metric(world: World, reuse: ReuseService) -> None:
    _, decode = await trio(world)
    await decode.report(running=0, held_blocks=7)
    await until(lambda: world.router.fleet.engines["d"].load)
    assert 'kvbus_held_blocks{engine="d"} 7.0' in await metrics(world)


@pytest.mark.parametrize(
    ("reported", "said"),
    [
        (took(64), "hit tokens=64"),
        (took(0, "not needed"), "miss reason=not_needed"),
        (took(0, "unavailable"), "miss reason=unavailable"),
        (answered, "miss reason=unavailable"),
    ],
)
async def test_the_answer_says_what_prefill_really_took(
    world: World, reuse: ReuseService, reported: Act, said: str
) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body))
    prefill.act = reported
    assert await ask(world, body) == said
    if reported is answered:  # it has not heard of the claim, so nobody else lets it go
        assert await until(lambda: world.said(ReuseReleased))


async def test_the_head_waits_for_prefills_word_but_not_for_long(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world, reuse_report_ms=100.0)
    body = conversation() | {"stream": True}
    await held(reuse, decode, await first_turn(world, prefill, body))
    word = asyncio.Event()
    prefill.act = took(32, pause=word)
    started_s = monotonic()
    assert await ask(world, body) == f"hit tokens={HELD}"
    assert 0.1 <= monotonic() - started_s < 2.0
    word.set()


@pytest.mark.parametrize("mode", ["early", "deferred"])
async def test_every_mode_with_a_ticket_reuses(world: World, reuse: ReuseService, mode: str) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body))
    assert await ask(world, body, x_kvbus_mode=mode) == f"hit tokens={HELD}"


# Misses


@pytest.mark.parametrize(("reason", "expected"), [("evicted", "withdrawn"), ("expired", "expired")])
async def test_what_was_withdrawn_is_a_miss_with_its_reason(
    world: World, reuse: ReuseService, reason: Any, expected: str
) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    key = await first_turn(world, prefill, body)
    offer_id = await held(reuse, decode, key)
    withdrawn = ReuseWithdrawn(conversation=key, offer_id=offer_id, engine_id="d", reason=reason)
    assert decode.bus is not None
    before = reuse.counters.total()
    await decode.bus.publish(withdrawn, "reuse")
    await until(lambda: reuse.counters.total() > before)
    assert await ask(world, body) == f"miss reason={expected}"
    assert "reuse" not in prefill.seen[-1].ticket


async def test_too_short_an_offer_is_a_miss(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body), tokens=32)
    assert await ask(world, body) == "miss reason=too_short"


async def test_a_holder_of_an_older_incarnation_is_a_miss(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body))
    assert decode.bus is not None
    decode.incarnation = decode.bus.incarnation = "another"
    await decode.announce()
    await until(lambda: world.router.fleet.engines["d"].incarnation == "another")
    assert await ask(world, body) == "miss reason=engine_gone"


async def test_a_holder_of_another_layout_is_let_go(world: World, reuse: ReuseService) -> None:
    old = await world.engine("decode", "old", compat_hash="old")
    prefill, _ = await trio(world)
    body = conversation()
    offer_id = await held(reuse, old, await first_turn(world, prefill, body))
    assert await ask(world, body) == "miss reason=incompatible"
    assert "reuse" not in prefill.seen[-1].ticket
    released = await until(lambda: world.said(ReuseReleased))
    assert (released[0].offer_id, released[0].reason) == (offer_id, "incompatible")


async def test_of_two_turns_at_once_one_reuses_and_both_are_answered(world: World, reuse: ReuseService) -> None:
    prefill, decode = await trio(world)
    body = conversation()
    await held(reuse, decode, await first_turn(world, prefill, body))
    assert sorted(await asyncio.gather(ask(world, body), ask(world, body))) == [
        f"hit tokens={HELD}",
        "miss reason=claimed",
    ]
    assert sum("reuse" in seen.ticket for seen in prefill.seen) == 1


async def test_without_a_reuse_process_a_turn_is_served_within_the_bound(world: World) -> None:
    await world.engine("prefill")
    await world.engine("decode")
    await world.start(reuse_ask_ms=30.0)
    started_s = monotonic()
    assert await ask(world, conversation()) == "miss reason=unavailable"
    assert monotonic() - started_s < 1.0


@pytest.mark.parametrize(
    ("settings", "extra", "headers"),
    [
        ({"reuse": False}, {}, {}),
        ({}, {"n": 2}, {}),
        ({}, {"prompt": ["a", "b"]}, {}),
        ({}, {"conversation_id": ""}, {}),
        ({}, {}, {"x_kvbus_mode": "local"}),
        ({}, {"prompt_logprobs": 1}, {}),
    ],
)
async def test_switched_off_or_without_a_conversation_nobody_is_asked(
    world: World, settings: dict[str, Any], extra: dict[str, Any], headers: dict[str, str]
) -> None:
    prefill, _ = await trio(world, **settings)
    assert await ask(world, conversation() | extra, **headers) == "miss reason=disabled"
    assert not world.said(ReuseAsked)
    assert all("conversation" not in seen.ticket for seen in prefill.seen)


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

    async def claim_as_decode_leaves(turn: Any, request_id: str) -> None:
        await claim(turn, request_id)
        world.router.fleet.card_gone("d", 0.0)

    world.router.reuse.claim = claim_as_decode_leaves  # type: ignore[method-assign]
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
