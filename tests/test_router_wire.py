"""HTTP as it is on the wire: pipelining, old clients, headers, back-pressure, kept connections."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from tests.router_world import SSE, World, until

from kvbus.embedded import EmbeddedNats

pytestmark = pytest.mark.nats

OK = b"HTTP/1.1 200 OK"


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def world(nats: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats.url) as made:
        yield made


def raw_post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = [b"POST /v1/completions HTTP/" + version, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", b""]) + body


async def test_requests_sent_ahead_are_answered_in_order(world: World) -> None:
    await world.engine("decode")
    await world.start(idle_timeout_s=0.2)
    many = b"".join(raw_post(b'{"prompt": "a"}', b"x-request-id: r%d" % number) for number in range(5))
    answer = await world.raw(many)
    assert answer.count(OK) == 5
    places = [answer.index(b"x-request-id: r%d\r\n" % number) for number in range(5)]
    assert places == sorted(places)


async def test_an_old_client_gets_its_answer_and_a_closed_connection(world: World) -> None:
    await world.engine("decode")
    await world.start()
    answer = await world.raw(raw_post(b'{"prompt": "a", "stream": true}', version=b"1.0"))
    assert answer.startswith(b"HTTP/1.0 200 OK")
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_expects_100_is_told_to_go_on(world: World) -> None:
    await world.engine("decode")
    await world.start()
    answer = await world.raw(raw_post(b'{"prompt": "a"}', b"expect: 100-continue", b"connection: close"))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_a_long_body_arrives_as_it_is(world: World) -> None:
    decode = await world.engine("decode")
    await world.start()
    body = b'{"prompt":"%b"}' % (b"x" * 900_000)
    async with world.post(body, x_kvbus_mode="local") as response:
        assert response.status == 200
    assert decode.seen[0].raw == body


async def test_odd_bytes_in_a_header_harm_nobody(world: World) -> None:
    decode = await world.engine("decode")
    await world.start()
    request = raw_post(b'{"prompt": "a"}', b"connection: close", b"x-odd: \xff\xfe\xc3\xa9", b"x-fine: 2")
    assert (await world.raw(request)).startswith(OK)
    assert decode.seen[0].headers["x-fine"] == "2"
    assert world.router.fleet.engines[decode.engine_id].rests_until_s == 0.0


@pytest.mark.parametrize(
    "request_line", [b"POST /v1/x\xff\xfe HTTP/1.1", b"GET /v1/x HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket"]
)
async def test_what_no_engine_could_be_sent_gets_400(world: World, request_line: bytes) -> None:
    decode = await world.engine("decode")
    await world.start()
    answer = await world.raw(request_line + b"\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 400 ", answer)
    assert b'"code":' in answer
    assert not decode.seen
    assert world.router.fleet.engines[decode.engine_id].rests_until_s == 0.0


async def test_a_body_that_trickles_in_gets_408(world: World) -> None:
    await world.start(read_timeout_s=0.1)
    answer = await world.raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


async def test_connections_to_an_engine_are_kept(world: World) -> None:
    decode = await world.engine("decode")
    ports: set[object] = set()

    async def note(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return web.json_response({"choices": []})

    decode.act = note
    await world.start()
    for _ in range(5):
        async with world.post() as response:
            assert response.status == 200
    assert len(ports) == 1


async def test_headers_of_one_hop_do_not_travel_on(world: World) -> None:
    decode = await world.engine("decode")
    await world.start()
    request = raw_post(b'{"prompt": "a"}', b"connection: close, x-secret", b"x-secret: 1", b"te: gzip", b"x-fine: 2")
    assert (await world.raw(request)).startswith(OK)
    headers = decode.seen[0].headers
    assert ("x-secret" in headers, "te" in headers, headers["x-fine"]) == (False, False, "2")


async def test_a_client_that_does_not_read_holds_its_engine_back_and_loses_nothing(world: World) -> None:
    decode = await world.engine("decode")
    chunk, total, sent = b"x" * 65536, 400, 0

    async def endless(_request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers=SSE)
        await response.prepare(_request)
        for _ in range(total):
            await response.write(chunk)
            sent += 1
        return response

    decode.act = endless
    await world.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", world.router.server.port)
    writer.write(raw_post(b'{"prompt": "a"}', version=b"1.0"))
    await until(lambda: sent > 10)
    await asyncio.sleep(0.5)
    held_at = sent
    await asyncio.sleep(0.2)
    assert held_at == sent < total
    async with asyncio.timeout(20):
        answer = await reader.read()
    assert answer.partition(b"\r\n\r\n")[2] == chunk * total
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("size", [60_000, 140_000, 300_000, 700_000])
async def test_a_connection_to_an_engine_is_fit_for_the_next_request_after_a_slow_client(
    world: World, size: int
) -> None:
    decode = await world.engine("decode")

    async def large(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * size)

    decode.act = large
    await world.start(deadline_s=5.0)
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.router.server.port, limit=1024)
        writer.write(raw_post(b'{"prompt": "a"}', b"connection: close"))
        await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            assert (await reader.read()).partition(b"\r\n\r\n")[2] == b"x" * size
        writer.close()
        await writer.wait_closed()
