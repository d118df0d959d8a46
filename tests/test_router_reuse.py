"""Conversations through the router, hits and misses: real NATS, a real reuse process, engines that do as told."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from time import monotonic
from typing import Any

import pytest
from tests.router_turns import HELD, ask, conversation, first_turn, held, took, trio
from tests.router_world import Act, World, answered, until

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.reuse.service import ReuseService
from kvbus.reuse.settings import ReuseSettings
from kvbus_schemas import (
    RequestServed,
    ReuseAsked,
    ReuseReleased,
    ReuseWithdrawn,
    RouteDecided,
)

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
async def reuse(nats: EmbeddedNats) -> AsyncIterator[ReuseService]:
    """A reuse process in this loop."""
    bus = await Bus.connect(BusSettings(nats=nats.url), name="reuse-1", incarnation="i")
    service = ReuseService(bus, ReuseSettings())
    await service.start()
    yield service
    await bus.close()


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
    assert 'kvbus_router_reuse_total{reason="",result="hit"} 1.0' in text
    assert 'kvbus_router_reuse_total{reason="new",result="miss"} 1.0' in text
    assert f"kvbus_router_reuse_tokens_total {HELD}.0" in text


async def metrics(world: World) -> str:
    await asyncio.sleep(0.05)
    async with world.http.get(world.router.url + "/metrics") as response:
        return await response.text()


async def test_held_blocks_are_a_metric(world: World, reuse: ReuseService) -> None:
    _, decode = await trio(world)
    await decode.report(running=0, held_blocks=7)
    await until(lambda: world.router.fleet.engines["d"].load)
    assert 'kvbus_router_held_blocks{engine="d"} 7.0' in await metrics(world)


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
