"""Stock vLLM engines with the pull connector behind the same router: `--static prefill=URL,decode=URL`."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from tests.vllm_world import World, prompt_of

from kvbus.engine.launch import plain_command, plain_environment
from kvbus.local.children import Child, kvbus_command
from kvbus.local.fleet import TEST_MODEL_ARGUMENTS
from kvbus.local.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]

READY_MAX_S = 240.0


def _stock(there: World, role: str, port: int, log_dir: Path) -> Child:
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    command = [*plain_command(there.fleet.model, port), "--served-model-name", there.model, *TEST_MODEL_ARGUMENTS]
    environ = plain_environment() | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return Child(f"stock-{role}", [*command, "--kv-transfer-config", json.dumps(config)], log_dir, environ)


async def test_stock_engines_hand_over_by_pull_behind_the_router(pair: World, tmp_path: Path) -> None:
    ports = {role: free_port() for role in ("kv_producer", "kv_consumer")}
    stock = [_stock(pair, role, port, tmp_path) for role, port in ports.items()]
    urls = [f"http://127.0.0.1:{port}" for port in ports.values()]
    router_port = free_port()
    static = f"prefill={urls[0]},decode={urls[1]}"
    command = kvbus_command("router", "--nats", pair.fleet.nats_url, "--port", str(router_port), "--static", static)
    router = Child("router", command, tmp_path)
    try:
        deadline_s = time.monotonic() + READY_MAX_S
        for url in (*urls, f"http://127.0.0.1:{router_port}"):
            while not await _healthy(pair, url):
                for child in (*stock, router):
                    child.check()
                assert time.monotonic() < deadline_s, url
                await asyncio.sleep(0.2)
        for seed in (1, 2):
            body = {"prompt": prompt_of(600, seed=seed + 900), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            asked = {**body, "return_token_ids": True}
            url = f"http://127.0.0.1:{router_port}/v1/completions"
            status, answer, headers = await pair.post(url, asked, {"X-Kvbus-Mode": "pull"})
            assert (status, headers["X-Kvbus-Mode"]) == (200, "pull"), answer
            expected = await pair.plain(body)
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
            assert await pair.metric(urls[1], "vllm:external_prefix_cache_hits_total") >= 600 * seed - 64
    finally:
        for child in (router, *stock):
            child.kill()


async def _healthy(there: World, url: str) -> bool:
    try:
        async with there.http.get(url + "/health") as response:
            return response.status == 200
    except OSError:
        return False
