"""What the router's tests of conversations share: turns, offers, and prefills that say what they took."""

import asyncio
import itertools
import secrets
from typing import Any

from aiohttp import web
from tests.router_world import COMPLETION, Act, Engine, World, until

from kvbus.reuse.service import ReuseService
from kvbus_schemas import ReuseOffered

HELD = 96
PATIENT_MS = 5000.0
_offers = itertools.count(1)


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
