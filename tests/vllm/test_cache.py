"""A router's index against real vLLM: what it expects is what vLLM's own prefix cache finds, and clearing is seen."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.router_world import until
from tests.vllm_world import World, prompt_of, world

from kvbus.process import new_incarnation
from kvbus.router import bodies
from kvbus.router.service import Router
from kvbus.router.settings import RouterSettings

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]

BLOCK = 32
HITS = "vllm:prefix_cache_hits_total"


@pytest_asyncio.fixture(loop_scope="session")
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # vLLM serves /reset_prefix_cache only then
    async with world(tmp_path, model="tiny", plain=False, router_arguments=["--no-reuse"]) as started:
        yield started


async def test_the_index_is_vllms_own_prefix_cache(there: World) -> None:
    router = Router(
        RouterSettings(nats=there.fleet.nats_url, port=0, reuse=False),
        name="router-test",
        incarnation=new_incarnation(),
    )
    await router.start()
    try:
        await until(lambda: router.caching.states.get("prefill-0") == "exact", timeout_s=20)
        prefill = there.fleet.engine("prefill-0").url
        first, more = prompt_of(640, seed=901), prompt_of(200, seed=902)
        await _ask(there, router, first)
        await until(lambda: len(router.caching.index.held("prefill-0")) >= len(first) // BLOCK)
        await until(lambda: "prefill-0" in router.caching.read(_asked(first + more)).hits)
        before = await there.metric(prefill, HITS)
        expected = router.caching.read(_asked(first + more)).hits["prefill-0"]
        await _ask(there, router, first + more)
        found = await there.metric(prefill, HITS) - before
        assert expected <= found == len(first)
        assert expected >= len(first) * 3 // 4
        await _cleared(there, router, prefill)
        assert "prefill-0" not in router.caching.read(_asked(first + more)).hits
        await _evicted(there, router)
    finally:
        await router.close()
    await there.settled()


async def _cleared(there: World, router: Router, prefill: str) -> None:
    """Nothing runs: the engine takes a step only to say it."""
    await there.settled()
    async with there.http.post(prefill + "/reset_prefix_cache") as response:
        assert response.status == 200
    await until(lambda: not router.caching.index.held("prefill-0"), timeout_s=10)
    assert router.caching.states["prefill-0"] == "exact"


async def _evicted(there: World, router: Router) -> None:
    """More than fits: the index never has more than the engine, and ends with what is left there."""
    for number in range(8):
        await _ask(there, router, prompt_of(2400, seed=910 + number))
    blocks = (await there.fleet.cards())["prefill-0"].num_blocks
    held = router.caching.index.held("prefill-0")
    assert blocks // 2 < len(held) <= blocks
    assert router.caching.read(_asked(prompt_of(2400, seed=910))).hits.get("prefill-0", 0) < 2400 // 2
    assert router.caching.read(_asked(prompt_of(2400, seed=917))).hits["prefill-0"] > 2400 // 2
    assert router.caching.states["prefill-0"] == "exact"


async def _ask(there: World, router: Router, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    status, answer, headers = await there.post(router.url + "/v1/completions", body)
    assert status == 200, answer
    assert headers["X-Kvbus-Mode"] == "early"
    await there.settled()


def _asked(prompt: list[int]) -> Any:
    """As `World.post` writes it: a router reads the bytes of a prompt, so that blanks count."""
    return bodies.read("completions", json.dumps({"model": "tiny", "prompt": prompt}).encode())
