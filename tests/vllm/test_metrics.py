"""kvbus's numbers on a real vLLM's own /metrics page: from its scheduler and its rank, also when it idles."""

import asyncio
import time

import pytest
from tests.metrics_world import Samples, samples_of, total
from tests.vllm_world import World, prompt_of

from kvbus.metrics import catalogue

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]

SOON_S = 25.0
"""An engine that idles reports every 5 s."""


async def page(pair: World, engine_id: str) -> Samples:
    async with pair.http.get(pair.fleet.engine(engine_id).url + "/metrics") as answer:
        return samples_of(await answer.text())


async def grown(pair: World, engine_id: str, name: str, than: float, **labels: str) -> float:
    """By how much a metric has grown, once it has."""
    deadline_s = time.monotonic() + SOON_S
    while (now := total(await page(pair, engine_id), name, **labels)) <= than:
        assert time.monotonic() < deadline_s, f"{name} of {engine_id} is still {now}"
        await asyncio.sleep(0.1)
    return now - than


async def test_what_scheduler_and_rank_count_stands_on_vllms_page(pair: World) -> None:
    before = {engine_id: await page(pair, engine_id) for engine_id in ("prefill-0", "decode-0")}
    pushed = total(before["prefill-0"], "kvbus_engine_handoff_seconds_count", kind="push")
    written = total(before["prefill-0"], "kvbus_engine_written_bytes_total", kind="push")
    ended = total(before["decode-0"], "kvbus_engine_transfers_total", outcome="completed")
    transfer_id = await pair.hand_over(prompt_of(700, seed=4242))
    await pair.closed(transfer_id)
    assert await grown(pair, "prefill-0", "kvbus_engine_handoff_seconds_count", pushed, kind="push") == 1
    assert await grown(pair, "prefill-0", "kvbus_engine_written_bytes_total", written, kind="push") > 700 * 1024
    assert await grown(pair, "decode-0", "kvbus_engine_transfers_total", ended, outcome="completed") == 1


async def test_an_engine_that_idles_reports_all_the_same(pair: World) -> None:
    heard = total(await page(pair, "decode-0"), "kvbus_bus_published_total")
    assert await grown(pair, "decode-0", "kvbus_bus_published_total", heard) > 0, "loads are said while nobody asks"


async def test_every_metric_of_an_engine_stands_on_the_page(pair: World) -> None:
    served = await page(pair, "decode-0")
    names = {m.name + "_bucket" if m.kind == "histogram" else m.exposed for m in (*catalogue.BUS, *catalogue.ENGINE)}
    assert names - served.keys() == set()
