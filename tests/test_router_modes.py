"""Which engines serve a request and how: modes, static engines, NATS that is lost, engines that come and go."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Iterator
from typing import get_args

import aiohttp
import pytest
from aiohttp import web
from tests.router_world import COMPLETION, Engine, World, answered, hang, status, streamed, until

from kvbus.embedded import EmbeddedNats
from kvbus.local.ports import free_port
from kvbus.router.policies import RouteChoice, RouteQuestion
from kvbus_schemas import CancelOrdered, RequestServed, Role, RouteDecided

pytestmark = pytest.mark.nats

REMOTE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", "remote_port": 1}


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def world(nats: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats.url) as made:
        yield made


async def ask(world: World, body: object = COMPLETION, **headers: str) -> tuple[int, str, dict]:  # type: ignore[type-arg]
    """Status, mode and JSON of the answer."""
    async with world.post(body, **headers) as response:
        return response.status, response.headers.get("x-kvbus-mode", ""), await response.json()


# Modes


async def test_deferred_chooses_decode_once_prefill_is_done(world: World) -> None:
    prefill = await world.engine("prefill", "p")
    one, two = await world.engine("decode", "d1"), await world.engine("decode", "d2")
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await answered(request)

    prefill.act = slow
    await world.start(policy="least_loaded")
    asking = asyncio.create_task(ask(world, x_kvbus_mode="deferred"))
    await until(lambda: prefill.seen)
    assert not one.seen
    assert not two.seen
    await one.report(running=9)
    await two.report(running=0)
    await until(lambda: world.router.fleet.engines["d1"].load and world.router.fleet.engines["d2"].load)
    go_on.set()
    assert (await asking)[:2] == (200, "deferred")
    assert len(two.seen) == 1
    assert prefill.seen[0].ticket.get("consumer_id", "") == ""
    assert two.seen[0].ticket["consumer_id"] == "d2"
    await until(lambda: world.said(RequestServed))
    first, second = world.said(RouteDecided)
    assert (first.transfer_id, first.decode_id, second.decode_id) == (second.transfer_id, "", "d2")


async def test_deferred_dispatches_again_when_prefill_fails(world: World) -> None:
    bad, good = await world.engine("prefill", "a-bad"), await world.engine("prefill", "b-good")
    await world.engine("decode")
    bad.act = status(500)
    await world.start()
    assert (await ask(world, x_kvbus_mode="deferred"))[0] == 200
    assert (len(bad.seen), len(good.seen)) == (1, 1)
    assert {order.reason for order in await until(lambda: world.said(CancelOrdered))} == {"prefill_failed"}


async def test_deferred_passes_a_client_error_of_prefill_on(world: World) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    prefill.act = status(400, "too long")
    await world.start()
    code, _, body = await ask(world, x_kvbus_mode="deferred")
    assert (code, body["error"]["message"]) == (400, "too long")
    assert not decode.seen


@pytest.mark.parametrize("mode", ["early", "deferred"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_was_started_again_unnoticed_costs_a_dispatch_and_no_error(
    world: World, mode: str, role: Role
) -> None:
    """Found by `kvbus chaos`: clients were told that a ticket they never saw was for another incarnation."""
    engines = {name: await world.engine(kind, name) for kind in get_args(Role) for name in (f"{kind}-a", f"{kind}-b")}

    async def refuse(_request: web.Request) -> web.StreamResponse:
        error = {"message": "ticket is for incarnation 'x'", "type": "invalid_ticket", "code": 400}
        return web.json_response({"error": error}, status=400)

    engines[f"{role}-a"].act = refuse
    await world.start()
    for _ in range(2):
        assert (await ask(world, x_kvbus_mode=mode))[0] == 200
    assert engines[f"{role}-a"].seen


async def test_deferred_lets_prefill_go_when_no_decode_is_left(world: World) -> None:
    prefill, decode = await world.engine("prefill", "p"), await world.engine("decode")
    told = await world.inbox("p")

    async def last_one_leaves(request: web.Request) -> web.StreamResponse:
        await decode.withdraw()
        await until(lambda: not world.router.fleet.alive("decode"))
        return await answered(request)

    prefill.act = last_one_leaves
    await world.start()
    assert (await ask(world, x_kvbus_mode="deferred"))[0] == 503
    assert (await until(lambda: told))[0].reason == "no_decode"


async def test_local_asks_decode_alone_and_sends_it_the_body_untouched(world: World) -> None:
    prefill, decode = await world.engine("prefill"), await world.engine("decode")
    await world.start()
    raw = b'  {"prompt" : "a",\n "max_tokens":3}  '
    async with world.post(raw, x_kvbus_mode="local") as response:
        assert response.headers["x-kvbus-mode"] == "local"
    assert decode.seen[0].raw == raw
    assert not prefill.seen


async def test_without_a_prefill_engine_a_request_is_local(world: World) -> None:
    await world.engine("decode")
    await world.start()
    assert (await ask(world))[:2] == (200, "local")


@pytest.mark.parametrize(
    "extra",
    [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}, {"best_of": 2}, {"use_beam_search": True}],
)
async def test_what_cannot_be_split_is_local_even_if_early_is_asked_for(world: World, extra: dict[str, object]) -> None:
    prefill = await world.engine("prefill")
    await world.engine("decode")
    await world.start()
    assert (await ask(world, COMPLETION | extra, x_kvbus_mode="early"))[:2] == (200, "local")
    assert not prefill.seen


async def test_prefill_and_decode_of_different_layouts_are_not_paired(world: World) -> None:
    old = await world.engine("prefill", compat_hash="old")
    await world.engine("decode", compat_hash="new")
    await world.start()
    assert (await ask(world))[1] == "local"
    assert not old.seen


async def test_models_are_told_apart(world: World) -> None:
    small, large = await world.engine("decode", model="small"), await world.engine("decode", model="large")
    await world.start()
    for _ in range(2):
        assert (await ask(world, COMPLETION | {"model": "large"}))[0] == 200
    assert (len(small.seen), len(large.seen)) == (0, 2)
    code, _, body = await ask(world, COMPLETION | {"model": "other"})
    assert (code, body["error"]["code"]) == (404, "model_not_found")
    assert "large, small" in body["error"]["message"]
    assert (await ask(world))[0] == 400


class Stubborn:
    """A policy that names an engine nobody offered."""

    name = "stubborn"

    def choose(self, question: RouteQuestion) -> RouteChoice:
        return RouteChoice(mode="local", prefill_id="", decode_id="elsewhere", reason=question.request_id)


async def test_a_policy_that_chooses_what_it_was_not_offered_is_an_error_of_ours(world: World) -> None:
    await world.engine("decode")
    await world.start(own_policy=Stubborn())
    code, _, body = await ask(world)
    assert (code, body["error"]["code"]) == (500, "policy_failed")


# Stock engines


async def test_pull_hands_what_prefill_left_to_decode_under_one_request_id(world: World) -> None:
    prefill, decode = await world.stock("prefill"), await world.stock("decode")

    async def prefilled(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": REMOTE})

    prefill.act = prefilled
    await world.start(static=[f"prefill={prefill.url},decode={decode.url}"])
    assert (await ask(world))[:2] == (200, "pull")
    sent = prefill.seen[0].body
    assert (sent["max_tokens"], sent["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert decode.seen[0].body == COMPLETION | {"kv_transfer_params": REMOTE}
    assert prefill.seen[0].headers["x-request-id"] == decode.seen[0].headers["x-request-id"]
    await until(lambda: world.said(RequestServed))
    assert not world.said(CancelOrdered)


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}])
async def test_stock_engines_compute_several_answers_in_one_place(world: World, body: dict[str, object]) -> None:
    prefill, decode = await world.stock("prefill"), await world.stock("decode")
    await world.start(static=[f"prefill={prefill.url},decode={decode.url}"])
    assert (await ask(world, body))[:2] == (200, "local")
    assert not prefill.seen


async def test_stock_engines_stand_beside_those_on_the_bus(world: World) -> None:
    prefill, decode = await world.stock("prefill"), await world.stock("decode")
    await world.engine("prefill")
    await world.engine("decode")
    await world.start(static=[f"prefill={prefill.url},decode={decode.url}"])
    assert [(await ask(world, x_kvbus_mode=mode))[1] for mode in ("early", "pull")] == ["early", "pull"]


async def test_pull_without_static_engines_says_how_to_have_it(world: World) -> None:
    await world.engine("decode")
    await world.start()
    code, _, body = await ask(world, x_kvbus_mode="pull")
    assert code == 400
    assert "--static" in body["error"]["message"]


async def test_the_other_prefill_is_tried_when_one_fails_and_decode_stays_trusted(world: World) -> None:
    prefill, decode = await world.stock("prefill"), await world.stock("decode")
    other = await world.stock("prefill")
    prefill.act = status(500)
    await world.start(static=f"prefill={prefill.url},decode={decode.url} prefill={other.url},decode={decode.url}")
    assert (await ask(world))[:2] == (200, "pull")
    assert (len(prefill.seen), len(other.seen), len(decode.seen)) == (1, 1, 1)


# Coming and going


async def test_without_a_decode_the_answer_is_503_until_one_comes(world: World) -> None:
    await world.start()
    async with world.post() as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        assert (await response.json())["error"]["code"] == "no_decode_engine"
    async with world.http.get(world.router.url + "/health") as response:
        assert response.status == 503
    await world.engine("decode")
    await until(lambda: world.router.fleet.alive("decode"))
    assert (await ask(world))[0] == 200
    async with world.http.get(world.router.url + "/health") as response:
        assert (response.status, (await response.json())["engines"]) == (200, {"prefill": 0, "decode": 1})


async def test_an_engine_that_withdraws_or_drains_gets_no_more(world: World) -> None:
    first, second = await world.engine("decode"), await world.engine("decode")
    await world.start()
    await first.announce(draining=True)
    await until(lambda: len(world.router.fleet.alive("decode")) == 1)
    assert (await ask(world))[0] == 200
    assert not first.seen
    await second.withdraw()
    await until(lambda: not world.router.fleet.alive("decode"))
    assert (await ask(world))[0] == 503


async def test_when_nats_is_lost_what_needs_it_gets_503_the_rest_is_served_and_all_heals() -> None:
    with EmbeddedNats(port=free_port()) as own:
        async with World(own.url) as world:
            prefill, decode = await world.engine("prefill"), await world.engine("decode")
            await world.start()
            assert (await ask(world))[1] == "early"
            await asyncio.to_thread(own.stop)
            await until(lambda: not world.router.presence.connected)
            async with world.post(x_kvbus_mode="early") as response:
                assert response.status == 503
                assert int(response.headers["retry-after"]) > 0
                assert (await response.json())["error"]["code"] == "bus_lost"
            assert (await ask(world))[:2] == (200, "local")
            async with world.http.get(world.router.url + "/health") as response:
                assert response.status == 503
                assert "NATS" in (await response.json())["reasons"][0]
            await asyncio.to_thread(own.start)
            await until(lambda: world.router.presence.connected, timeout_s=10)
            assert world.router.fleet.alive("decode")
            for engine in (prefill, decode):
                await _announce_again(engine)
            assert (await ask(world, x_kvbus_mode="early"))[:2] == (200, "early")


async def _announce_again(engine: Engine) -> None:
    await until(lambda: engine.bus and engine.bus.connected, timeout_s=10)
    await engine.announce()


async def test_a_router_starts_before_nats_and_comes_to_it_later() -> None:
    own = EmbeddedNats(port=free_port())
    url = f"nats://127.0.0.1:{own.port}"
    async with aiohttp.ClientSession() as http:
        world = World(url)
        world.http = http
        await world.start(connect_timeout_s=0.2)
        try:
            assert (await ask(world))[2]["error"]["code"] == "bus_lost"
            own.start()
            await until(lambda: world.router.presence.connected, timeout_s=10)
            assert (await ask(world))[2]["error"]["code"] == "no_decode_engine"
        finally:
            await world.router.close()
            own.stop()


async def test_draining_finishes_what_runs_and_takes_no_more(world: World) -> None:
    decode = await world.engine("decode")
    pause = asyncio.Event()
    decode.act = streamed(b"data: one\n\n", b"data: two\n\n", pause=pause)
    await world.start(drain_s=5.0)
    async with world.post(COMPLETION | {"stream": True}) as response:
        assert await response.content.readany() == b"data: one\n\n"
        draining = asyncio.create_task(world.router.drain())
        await until(lambda: world.router.server.draining)
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(world)
        pause.set()
        assert await response.content.read() == b"data: two\n\n"
    async with asyncio.timeout(3):
        await draining


async def test_draining_breaks_off_and_cancels_what_is_too_slow(world: World) -> None:
    await world.engine("prefill")
    decode = await world.engine("decode")
    decode.act = hang
    await world.start(drain_s=0.1)
    asking = asyncio.create_task(ask(world))
    await until(lambda: decode.seen)
    await world.router.drain()
    with pytest.raises(aiohttp.ClientError):
        await asking
    await until(lambda: len(world.said(CancelOrdered)) == 2)


async def text(world: World, url: str) -> str:
    """What is there."""
    async with world.http.get(url) as response:
        return await response.text()


@contextlib.asynccontextmanager
async def two_workers(world: World) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`kvbus router --workers 2` and where it listens."""
    code = "import typer; from kvbus.cli.router import register; app = typer.Typer(); register(app); app()"
    command = [
        sys.executable,
        "-c",
        code,
        "--nats",
        world.nats,
        "--port",
        "0",
        "--workers",
        "2",
        "--policy",
        "round_robin",
    ]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        urls: list[str] = []
        async with asyncio.timeout(30):
            while len(urls) < 2:
                line = await process.stderr.readline()
                assert line, "the router has ended"
                urls += re.findall(r'"url": *"([^"]+)"', line.decode())  # two workers may share a line
        assert urls[0] == urls[1]
        yield process, urls[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        async with asyncio.timeout(30):
            await process.stderr.read()  # type: ignore[union-attr]  # ends with the last worker
            await process.wait()


async def test_workers_share_a_port_and_their_metrics(world: World) -> None:
    await world.engine("prefill")
    await world.engine("decode")
    async with two_workers(world) as (process, url):
        for _ in range(8):
            async with world.http.post(url + "/v1/completions", json=COMPLETION) as response:
                assert response.status == 200
        served = 'kvbus_router_requests_total{mode="early",status="200"} 8.0'
        async with asyncio.timeout(5):
            while served not in await text(world, url + "/metrics"):  # noqa: ASYNC110  (another process)
                await asyncio.sleep(0.02)
        process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_workers_do_not_outlive_their_supervisor(world: World) -> None:
    async with two_workers(world) as (process, url):
        process.kill()
        await process.wait()
        async with asyncio.timeout(30):
            while await _listening(url):  # noqa: ASYNC110  (other processes)
                await asyncio.sleep(0.02)


async def _listening(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True
