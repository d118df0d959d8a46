"""An engine that is stopped answers what it was at with status 200 and half an answer; clients never take that for one.

Found by `kvbus chaos`, as wrong tokens: vLLM's last word on a request that it aborts is `finish_reason: abort`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from tests.router_world import COMPLETION, World, streamed

from kvbus.embedded import EmbeddedNats

pytestmark = pytest.mark.nats

HALF = b'{"choices":[{"text":"o","finish_reason":"abort"}]}'
SPOKEN_OF = b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":"stop"}]}'


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def world(nats: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats.url) as made:
        yield made


def whole(body: bytes) -> object:
    async def act(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return act


@pytest.mark.parametrize("mode", ["early", "deferred", "local"])
@pytest.mark.parametrize("stream", [False, True])
async def test_half_an_answer_costs_a_dispatch_as_long_as_nothing_was_sent(
    world: World, mode: str, stream: bool
) -> None:
    await world.engine("prefill")
    bad, good = await world.engine("decode", "a-bad"), await world.engine("decode", "b-good")
    bad.act = streamed(b"data: " + HALF + b"\n\n", b"data: [DONE]\n\n") if stream else whole(HALF)  # type: ignore[assignment]
    await world.start()
    for _ in range(2):
        async with world.post({**COMPLETION, "stream": stream}, x_kvbus_mode=mode) as response:
            assert response.status == 200
            assert b"ok" in await response.read()
    assert bad.seen
    assert good.seen


async def test_a_stream_that_is_given_up_ends_with_an_error_that_says_so(world: World) -> None:
    decode = await world.engine("decode")
    begun = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    go_on = asyncio.Event()
    decode.act = streamed(begun, b"data: " + HALF + b"\n\n", b"data: [DONE]\n\n", pause=go_on)
    await world.start()
    async with world.post({**COMPLETION, "stream": True}, x_kvbus_mode="local") as response:
        said = await response.content.readuntil(b"\n\n")
        go_on.set()
        said += await response.read()
    assert said.startswith(begun)
    assert b"[DONE]" not in said
    assert b'"engine_failed"' in said
    assert b"being stopped" in said


async def test_an_answer_that_speaks_of_an_abort_is_none(world: World) -> None:
    decode = await world.engine("decode")
    decode.act = whole(SPOKEN_OF)  # type: ignore[assignment]
    await world.start()
    async with world.post(COMPLETION, x_kvbus_mode="local") as response:
        assert (response.status, await response.read()) == (200, SPOKEN_OF)
