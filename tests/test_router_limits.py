"""What the router refuses, and the pages and paths that it answers or forwards."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.router_world import COMPLETION, World, hang, status, until

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


async def refusal(world: World, body: object = COMPLETION, **headers: str) -> tuple[int, str]:
    """Status and code of an error."""
    async with world.post(body, **headers) as response:
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "code"}
        return response.status, error["code"]


def raw_post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = [b"POST /v1/completions HTTP/" + version, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", b""]) + body


# Bodies


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": nan}', b"[" * 100_000, b'{"model": 3}', b'{"vllm_xargs": 3}'],
)
async def test_a_malformed_body_gets_400(world: World, body: bytes) -> None:
    decode = await world.engine("decode")
    await world.start()
    assert await refusal(world, body) == (400, "malformed_body")
    assert not decode.seen


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {"a": 1}}',
        b'{"kv_transfer_p\\u0061rams": {"a": 1}}',
        b'{"vllm_xargs": {"kv_transfer_params": "x"}}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_kv_transfer_params_of_a_client_are_refused(world: World, body: bytes, path: str) -> None:
    await world.engine("decode")
    await world.start()
    async with world.post(body, path=path) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "kv_transfer_params_refused"


async def test_an_unknown_mode_is_refused(world: World) -> None:
    await world.start()
    assert await refusal(world, x_kvbus_mode="fast") == (400, "unknown_mode")


async def test_generation_wants_a_post(world: World) -> None:
    await world.start()
    async with world.http.get(world.router.url + "/v1/completions") as response:
        assert response.status == 405


# Limits


async def test_a_body_over_the_limit_gets_413_without_being_read(world: World) -> None:
    await world.start(body_bytes_max=1000)
    answer = await world.raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


async def test_a_chunked_body_over_the_limit_gets_413(world: World) -> None:
    await world.start(body_bytes_max=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await world.raw(head + b"400\r\n" + b"x" * 0x400)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
async def test_headers_over_the_limit_get_431_finished_or_not(world: World, end: bytes) -> None:
    await world.start(header_bytes_max=1000)
    answer = await world.raw(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 1000 + end)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_what_is_no_http_gets_400(world: World) -> None:
    await world.start()
    assert re.match(rb"HTTP/1\.[01] 400 ", await world.raw(b"\x16\x03\x01 hello\r\n\r\n"))


async def test_over_the_connection_limit_the_answer_is_503(world: World) -> None:
    await world.start(connections_max=1)
    _, writer = await asyncio.open_connection("127.0.0.1", world.router.server.port)
    await until(lambda: world.router.server.connections)
    answer = await world.raw(b"")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in answer
    writer.close()
    await writer.wait_closed()


async def test_an_idle_connection_is_closed(world: World) -> None:
    await world.start(idle_timeout_s=0.1)
    assert await world.raw(b"GET /metrics2 HTTP/1.1\r\nhost: x\r\n\r\n") != b""


async def test_a_request_that_trickles_in_gets_408(world: World) -> None:
    await world.start(read_timeout_s=0.1)
    assert (await world.raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")).startswith(b"HTTP/1.1 408 ")


async def test_beyond_the_waiting_room_429_and_after_a_long_wait_503(world: World) -> None:
    decode = await world.engine("decode")
    decode.act = hang
    await world.start(requests_in_flight_max=1, requests_waiting_max=1, wait_max_s=0.3, deadline_s=20.0)
    running = asyncio.create_task(refusal(world))
    await until(lambda: decode.seen)
    waiting = asyncio.create_task(refusal(world))
    await until(lambda: world.router.gate.waiting)
    async with world.post() as response:
        assert response.status == 429
        assert int(response.headers["retry-after"]) > 0
    assert await waiting == (503, "wait_too_long")
    running.cancel()
    await until(lambda: not world.router.gate.in_flight)
    assert len(decode.seen) == 1


async def test_a_client_that_leaves_the_waiting_room_leaves_no_trace(world: World) -> None:
    decode = await world.engine("decode")
    decode.act = hang
    await world.start(requests_in_flight_max=1)
    running = asyncio.create_task(refusal(world))
    await until(lambda: decode.seen)
    waiting = asyncio.create_task(refusal(world))
    await until(lambda: world.router.gate.waiting)
    waiting.cancel()
    await until(lambda: not world.router.gate.waiting)
    running.cancel()
    await until(lambda: not world.router.gate.in_flight)
    assert len(decode.seen) == 1


async def test_a_wait_that_outlasts_the_deadline_gets_504(world: World) -> None:
    decode = await world.engine("decode")
    decode.act = hang
    await world.start(requests_in_flight_max=1, deadline_s=0.2)
    answers = await asyncio.gather(refusal(world), refusal(world))
    assert set(answers) == {(504, "deadline_exceeded")}
    assert len(decode.seen) <= 2


async def test_a_place_goes_to_the_one_that_waits(world: World) -> None:
    decode = await world.engine("decode")
    await world.start(requests_in_flight_max=1)

    async def one() -> int:
        async with world.post() as response:
            return response.status

    assert await asyncio.gather(*(one() for _ in range(20))) == [200] * 20
    assert len(decode.seen) == 20
    assert world.router.gate.in_flight == 0


# Pages and paths


async def test_models_are_the_engines_own_list(world: World) -> None:
    await world.engine("decode", model="tiny")
    silent = await world.engine("decode", model="silent")
    silent.act = status(500)
    await world.start()
    async with world.http.get(world.router.url + "/v1/models") as response:
        listed = await response.json()
    assert listed["object"] == "list"
    assert sorted(model["id"] for model in listed["data"]) == ["silent", "tiny"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/embeddings?x=1"), ("POST", "/tokenize"), ("GET", "/version")]
)
async def test_everything_else_goes_to_a_decode_as_it_is(world: World, method: str, path: str) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    decode.act = status(418, "as it is")
    await world.start()
    async with world.http.request(method, world.router.url + path, data=b"\x00 anything") as response:
        assert (response.status, (await response.json())["error"]["message"]) == (418, "as it is")
    assert (decode.seen[0].method, decode.seen[0].path, decode.seen[0].raw) == (method, path, b"\x00 anything")
    assert not prefill.seen


async def test_head_is_answered_without_a_body(world: World) -> None:
    await world.engine("decode")
    await world.start()
    async with world.http.head(world.router.url + "/version") as response:
        assert response.status == 200


async def test_an_unknown_path_gets_404(world: World) -> None:
    await world.start()
    async with world.post(path="/admin") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_metrics_count_what_was_served(world: World) -> None:
    await world.engine("prefill")
    decode = await world.engine("decode")
    await world.start()
    async with world.post() as response:
        assert response.status == 200
    decode.act = status(400)
    assert (await refusal(world))[0] == 400
    await asyncio.sleep(0.05)
    async with world.http.get(world.router.url + "/metrics") as response:
        text = await response.text()
    for line in (
        'kvbus_router_requests_total{mode="early",status="200"} 1.0',
        'kvbus_router_requests_total{mode="early",status="400"} 1.0',
        'kvbus_router_ttft_seconds_count{mode="early"} 2.0',
        'kvbus_router_cancels_total{reason="decode_refused"} 2.0',
        'kvbus_router_engines{role="decode"} 1.0',
        "kvbus_router_requests_in_flight 0.0",
        "kvbus_bus_connected 1.0",
        'kvbus_router_reuse_total{reason="disabled",result="miss"} 2.0',
    ):
        assert line in text
