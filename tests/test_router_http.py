"""The router over real HTTP, with engines that do as they are told and a real NATS."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import msgspec
import pytest
from tests.router_world import COMPLETION, World, answered, broken, hang, status, streamed, until

from kvbus.embedded import EmbeddedNats
from kvbus_schemas import CancelOrdered, RequestServed, RouteDecided

pytestmark = pytest.mark.nats

STREAM = COMPLETION | {"stream": True}


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    """A NATS of this file's own: every engine card in it is ours."""
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def world(nats: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats.url) as made:
        yield made


# The answer


async def test_a_stream_is_passed_on_byte_by_byte(world: World) -> None:
    chunks = [
        b"data: \xe2\x82",
        b"\xac\n",
        b"\ndata: {}\n\n",
        b"no sse at all\x00\r\n\r\n",
        b"x" * 300_000,
        b"data: [DONE]\n\n",
    ]
    await world.engine("prefill")
    decode = await world.engine("decode")
    decode.act = streamed(*chunks)
    await world.start()
    async with world.post(STREAM) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert await response.read() == b"".join(chunks)


async def test_a_chunk_is_passed_on_before_the_next_one_is_there(world: World) -> None:
    decode = await world.engine("decode")
    pause = asyncio.Event()
    decode.act = streamed(b"data: first\n\n", b"data: second\n\n", pause=pause)
    await world.start()
    async with world.post(STREAM) as response:
        assert await response.content.readany() == b"data: first\n\n"
        pause.set()
        assert await response.content.read() == b"data: second\n\n"


async def test_the_head_waits_for_the_first_byte_so_that_another_dispatch_stays_possible(world: World) -> None:
    first, second = await world.engine("decode"), await world.engine("decode")
    first.act = second.act = _head_then_die_once(first.seen, second.seen)
    await world.start()
    async with world.post(STREAM) as response:
        assert await response.read() == b"data: at last\n\n"
    assert len(first.seen) == len(second.seen) == 1


def _head_then_die_once(*seen: list):  # type: ignore[no-untyped-def,type-arg]
    async def act(request):  # type: ignore[no-untyped-def]
        if sum(map(len, seen)) == 1:
            return await streamed(then="die")(request)
        return await streamed(b"data: at last\n\n")(request)

    return act


async def test_ids_and_mode_are_in_the_answer_and_the_trace_goes_on(world: World) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    await world.start()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with world.post(x_request_id="people.can-read", traceparent=f"00-{trace_id}-b7ad6b7169203331-01") as response:
        assert response.headers["x-request-id"] == "people.can-read"
        assert response.headers["x-kvbus-mode"] == "early"
        assert response.headers["x-kvbus-reuse"] == "miss reason=disabled"
        transfer_id = response.headers["x-kvbus-transfer"]
        await response.read()
    await until(lambda: world.said(RequestServed))
    for leg in (*prefill.seen, *decode.seen):
        assert leg.headers["x-request-id"] == "people.can-read"
        assert leg.headers["traceparent"].startswith(f"00-{trace_id}-")
        assert leg.ticket["transfer_id"] == transfer_id
    decided, served = world.said(RouteDecided)[0], world.said(RequestServed)[0]
    expected = (transfer_id, "people.can-read", trace_id)
    assert (decided.transfer_id, decided.request_id, decided.trace_id) == expected
    assert (served.transfer_id, served.request_id, served.trace_id) == expected


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "naïve", "a\tb"])
async def test_a_harmful_request_id_is_replaced(world: World, bad: str) -> None:
    await world.engine("decode")
    await world.start()
    async with world.post(x_request_id=bad) as response:
        assert response.status == 200
        assert response.headers["x-request-id"] != bad
        assert len(response.headers["x-request-id"]) == 32


async def test_the_official_client_streams_chat(world: World) -> None:
    openai = pytest.importorskip("openai")
    await world.engine("prefill")
    decode = await world.engine("decode")
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    choice = {"index": 0, "delta": {"content": "hi"}}
    event = b"data: %b\n\n" % msgspec.json.encode(chunk | {"choices": [choice]})
    decode.act = streamed(event, event, b"data: [DONE]\n\n")
    await world.start()
    async with openai.AsyncOpenAI(base_url=world.router.url + "/v1", api_key="k") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
        )
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["hi", "hi"]


# The legs


async def test_early_sends_both_legs_at_once_with_their_tickets(world: World) -> None:
    prefill, decode = await world.engine("prefill", "p"), await world.engine("decode", "d")
    prefill.act = hang
    await world.start()
    async with world.post({"prompt": ["a", "b"], "max_tokens": 7, "stream": True, "logprobs": 1}) as response:
        assert response.status == 200
    seen, answer = prefill.seen[0], decode.seen[0]
    assert seen.ticket | {"deadline_s": 0} == {
        "transfer_id": answer.ticket["transfer_id"],
        "role": "produce",
        "mode": "early",
        "producer_id": "p",
        "producer_incarnation": prefill.incarnation,
        "consumer_id": "d",
        "consumer_incarnation": decode.incarnation,
        "deadline_s": 0,
        "request_id": response.headers["x-request-id"],
        "parts": 2,
    }
    assert answer.ticket == seen.ticket | {"role": "consume"}
    assert (seen.body["max_tokens"], seen.body["stream"], "logprobs" in seen.body) == (1, False, False)
    assert (answer.body["max_tokens"], answer.body["stream"], answer.body["logprobs"]) == (7, True, 1)


async def test_what_is_said_on_the_bus_is_the_decision_and_the_end(world: World) -> None:
    await world.engine("prefill", "p")
    await world.engine("decode", "d")
    await world.start()
    async with world.post() as response:
        await response.read()
    await until(lambda: world.said(RequestServed))
    decided, served = world.messages
    assert isinstance(decided, RouteDecided)
    assert (decided.prefill_id, decided.decode_id, decided.mode, decided.attempt) == ("p", "d", "early", 1)
    assert {candidate.engine_id for candidate in decided.candidates} == {"p", "d"}
    assert isinstance(served, RequestServed)
    assert (served.outcome, served.status, served.transfer_id) == ("completed", 200, decided.transfer_id)
    assert 0 < served.ttft_ms <= served.duration_ms


@pytest.mark.parametrize("fault", [status(500), status(400), broken])
async def test_when_prefill_fails_both_are_told_and_decode_still_answers(world: World, fault) -> None:  # type: ignore[no-untyped-def]
    prefill, decode = await world.engine("prefill", "p"), await world.engine("decode", "d")
    prefill.act = fault
    told = [await world.inbox("p"), await world.inbox("d")]
    go_on = asyncio.Event()
    decode.act = _after(go_on)
    await world.start()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_status_and_body(world))
        await until(lambda: all(told))
        go_on.set()
    assert asking.result()[0] == 200
    assert {order.reason for order in await until(lambda: world.said(CancelOrdered))} == {"prefill_failed"}
    assert len(decode.seen) == 1


def _after(event: asyncio.Event):  # type: ignore[no-untyped-def]
    async def act(request):  # type: ignore[no-untyped-def]
        await event.wait()
        return await answered(request)

    return act


async def _status_and_body(world: World, body: object = COMPLETION, **headers: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    async with world.post(body, **headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("fault", [status(500), status(503), broken])
async def test_decode_failing_before_the_first_byte_means_another_dispatch(world: World, fault) -> None:  # type: ignore[no-untyped-def]
    prefill = await world.engine("prefill", "p")
    bad, good = await world.engine("decode", "bad"), await world.engine("decode", "good")
    bad.act = fault
    await world.start()
    assert (await _status_and_body(world))[0] == 200
    assert (await _status_and_body(world))[0] == 200
    await until(lambda: len(world.said(RequestServed)) == 3)
    assert [served.outcome for served in world.said(RequestServed)].count("retried") == 1
    assert len({decided.transfer_id for decided in world.said(RouteDecided)}) == 3
    assert {order.reason for order in world.said(CancelOrdered)} == {"decode_failed"}
    assert len(bad.seen) == 1
    assert len(good.seen) == 2
    assert len(prefill.seen) == 3


async def test_an_error_as_the_first_event_counts_as_before_the_first_byte(world: World) -> None:
    bad, good = await world.engine("decode", "a-bad"), await world.engine("decode", "b-good")
    bad.act = streamed(b'data: {"error": {"message": "no", "code": 500}}\n\n', b"data: [DONE]\n\n")
    await world.start()
    async with world.post(STREAM) as response:
        assert b"error" not in await response.read()
    assert (len(bad.seen), len(good.seen)) == (1, 1)


async def test_dispatches_are_limited(world: World) -> None:
    decodes = [await world.engine("decode") for _ in range(4)]
    for decode in decodes:
        decode.act = broken
    await world.start(attempts_max=3)
    code, body = await _status_and_body(world)
    assert (code, body["error"]["code"], body["error"]["type"]) == (502, "engine_failed", "server_error")
    assert sum(len(decode.seen) for decode in decodes) == 3


async def test_a_client_error_of_decode_is_passed_on_and_cancels_prefill(world: World) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    prefill.act = hang
    decode.act = status(422, "bad grammar")
    await world.start()
    assert await _status_and_body(world) == (422, {"error": {"message": "bad grammar", "type": "x", "code": 422}})
    await until(lambda: prefill.seen[0].left)
    await until(lambda: len(world.said(CancelOrdered)) == 2)
    assert len(decode.seen) == 1


async def test_after_the_first_byte_a_stream_ends_with_an_error_event(world: World) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    decode.act = streamed(b"data: one\n\n", then="die")
    await world.start()
    async with world.post(STREAM) as response:
        body = await response.read()
    assert body.startswith(b'data: one\n\ndata: {"error":{"message":"decode engine ')
    assert body.endswith(b'"code":"engine_failed"}}\n\n')
    assert len(prefill.seen) == len(decode.seen) == 1
    served = await until(lambda: world.said(RequestServed))
    assert served[0].outcome == "failed"


async def test_an_error_event_is_readable_after_half_an_event(world: World) -> None:
    decode = await world.engine("decode")
    decode.act = streamed(b"data: one\n\n", b'data: {"ha', then="die")
    await world.start()
    async with world.post(STREAM) as response:
        events = (await response.read()).split(b"\n\n")
    assert events[:2] == [b"data: one", b'data: {"ha']
    assert events[2].startswith(b'data: {"error":')


async def test_an_answer_that_is_no_stream_is_visibly_cut_short(world: World) -> None:
    decode = await world.engine("decode")

    async def half(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(headers={"content-length": "100", "content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"half":')
        await asyncio.sleep(0.05)
        return await broken(request)

    decode.act = half
    await world.start()
    with pytest.raises(aiohttp.ClientPayloadError):
        async with world.post() as response:
            await response.read()


async def test_a_client_that_leaves_cancels_both_legs(world: World) -> None:
    prefill, decode = await world.engine("prefill", "p"), await world.engine("decode", "d")
    prefill.act = decode.act = hang
    told = [await world.inbox("p"), await world.inbox("d")]
    await world.start()
    asking = asyncio.create_task(_status_and_body(world))
    await until(lambda: prefill.seen and decode.seen)
    asking.cancel()
    await until(lambda: prefill.seen[0].left and decode.seen[0].left)
    await until(lambda: all(told))
    assert {order.reason for inbox in told for order in inbox} == {"client_left"}  # type: ignore[union-attr]
    served = await until(lambda: world.said(RequestServed))
    assert (served[0].outcome, served[0].status) == ("cancelled", 499)
    assert len(decode.seen) == 1


async def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_decode(world: World) -> None:
    decode = await world.engine("decode")
    decode.act = streamed(b"data: one\n\n", b"data: two\n\n", pause=asyncio.Event())
    await world.start()
    async with world.post(STREAM) as response:
        await response.content.readany()
        response.close()
    await until(lambda: decode.seen[0].left)


async def test_a_request_over_its_deadline_is_cancelled_and_answered_504(world: World) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    decode.act = hang
    await world.start(deadline_s=0.2)
    code, body = await _status_and_body(world)
    assert (code, body["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: decode.seen[0].left)
    assert prefill.seen[0].ticket["deadline_s"] <= 0.2
    assert {order.reason for order in await until(lambda: world.said(CancelOrdered))} == {"deadline"}


async def test_an_engine_that_comes_back_as_another_incarnation_owes_nothing(world: World) -> None:
    old = await world.engine("decode", "d")
    old.act = hang
    other = await world.engine("decode", "e")
    await world.start()
    asking = asyncio.create_task(_status_and_body(world))
    await until(lambda: old.seen)
    assert old.bus is not None
    old.bus.incarnation = "another"
    await old.announce()
    assert (await asking)[0] == 200
    assert len(other.seen) == 1
