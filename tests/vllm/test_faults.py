"""Faults of the stock protocol that are about vLLM's own hooks, on real vLLM: the engine lives, the tokens are right,
blocks come back at once and not at the end of a lease. Which fault each test is for: tests/fault_table.py."""

import asyncio
import sys
import time
from typing import Any

import pytest
from tests.vllm_world import World, prompt_of, tokens_of

from kvbus_schemas import BlocksReady, TransferClosed

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]

SEQUENCES_MAX = 8
"""As in the fleet's arguments: more requests than these wait in an engine."""
CRAFTED: list[Any] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": "not a port"},
    {"do_remote_decode": True, "do_remote_prefill": True, "remote_block_ids": [[-1]], "tp_size": 0},
    {"do_remote_prefill": True, "remote_block_ids": [[10**9]], "remote_request_id": "cmpl-1", "remote_engine_id": ""},
    {"kvbus": None},
    {"kvbus": []},
    {"kvbus": {"version": 99}},
    {"transfer_id": "a" * 32, "kvbus": "b"},
    {"x" * 1000: {"y": [[[[]]]]}},
]


async def _leave(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_crafted_transfer_params_never_reach_the_engine_loop(pair: World) -> None:
    for engine_id in ("prefill-0", "decode-0"):
        url = pair.fleet.engine(engine_id).url + "/v1/completions"
        for params in CRAFTED:
            body = {"prompt": [5, 6, 7], "max_tokens": 1, "kv_transfer_params": params}
            status, answer, _ = await pair.post(url, body)
            assert status in (200, 400), answer
        assert pair.fleet.engine(engine_id).child.exit_code is None
    await pair.hand_over(prompt_of(200, seed=51))


async def test_a_decode_request_that_ends_before_it_was_scheduled_frees_prefill_at_once(pair: World) -> None:
    url = pair.fleet.engine("decode-0").url + "/v1/completions"
    long = {"prompt": prompt_of(20, seed=52), "max_tokens": 3000, "ignore_eos": True}
    busy = [asyncio.create_task(pair.post(url, long)) for _ in range(SEQUENCES_MAX)]
    await _until_running(pair, SEQUENCES_MAX)
    produce, consume = await pair.tickets(deadline_s=100.0)
    prompt = prompt_of(300, seed=53)
    decode = asyncio.create_task(pair.decode_leg(consume, prompt))
    await pair.prefill_leg(produce, prompt)
    await pair.until_heard(BlocksReady, produce.transfer_id)
    assert (await pair.usage())["prefill-0"] > 0
    since_s = time.monotonic()
    await _leave(decode)
    (closed,) = await pair.until_heard(TransferClosed, produce.transfer_id)
    assert isinstance(closed, TransferClosed)
    assert "before it was scheduled" in closed.reason
    while (await pair.usage())["prefill-0"]:
        assert time.monotonic() - since_s < 10, "not before its lease"
        await asyncio.sleep(0.05)
    await _leave(*busy)


async def _until_running(pair: World, count: int) -> None:
    url = pair.fleet.engine("decode-0").url
    async with asyncio.timeout(30):
        while await pair.metric(url, "vllm:num_requests_running") < count:  # noqa: ASYNC110  (another process's doing)
            await asyncio.sleep(0.05)


async def test_one_request_id_for_several_requests_never_mixes_them_up(pair: World) -> None:
    """Together, one after the other, and after one that was given up half-way."""
    headers = {"X-Request-Id": "the-same"}
    bodies = [{"prompt": prompt_of(500, seed=60 + number), "max_tokens": 8} for number in range(4)]
    given_up = asyncio.create_task(pair.routed({"prompt": prompt_of(3000, seed=59), "max_tokens": 8}, headers))
    await asyncio.sleep(0.3)
    await _leave(given_up)
    answers = await asyncio.gather(*(pair.routed(body, headers) for body in bodies[:3]))
    answers.append(await pair.routed(bodies[3], headers))
    for body, answer in zip(bodies, answers, strict=True):
        assert tokens_of(answer) == tokens_of(await pair.plain(body))
        assert answer["headers"]["x-request-id"] == "the-same"
    transfers = {answer["headers"]["x-kvbus-transfer"] for answer in answers}
    assert len(transfers) == len(bodies)


async def test_a_request_that_is_aborted_just_when_it_finishes_leaves_nothing_behind(pair: World) -> None:
    for number in range(6):
        produce, consume = await pair.tickets()
        prompt = prompt_of(400, seed=70 + number)
        decode = asyncio.create_task(pair.decode_leg(consume, prompt, max_tokens=1))
        prefill = asyncio.create_task(pair.prefill_leg(produce, prompt))
        await pair.until_heard_ordered(produce.transfer_id)
        await asyncio.sleep(0.02 * number)
        await _leave(prefill if number % 2 else decode)
        await asyncio.gather(prefill, decode, return_exceptions=True)
        assert (await pair.closed(produce.transfer_id)).outcome in ("completed", "failed", "cancelled")
    await pair.settled()


REFUSED = """
from types import SimpleNamespace as N
from kvbus.engine.vllm_parts import EngineError, check_supported
for groups, pp, dcp in (([1, 2], 1, 1), ([1], 2, 1), ([1], 1, 2), ([1], 1, 1)):
    parallel = N(pipeline_parallel_size=pp, decode_context_parallel_size=dcp)
    try:
        check_supported(N(parallel_config=parallel), N(kv_cache_groups=groups))
        print("taken")
    except EngineError as error:
        print(error)
"""


async def test_what_kvbus_cannot_hand_over_is_refused_at_start() -> None:
    """Hybrid attention (Mamba, sliding windows), pipeline and context parallelism."""
    asked = await asyncio.create_subprocess_exec(sys.executable, "-c", REFUSED, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    hybrid, pipeline, context, plain = said.decode().splitlines()[-4:]
    assert "hybrid attention" in hybrid
    assert "pipeline" in pipeline
    assert "pipeline" in context
    assert plain == "taken"
