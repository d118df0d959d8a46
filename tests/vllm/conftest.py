"""Fleets of real vLLM engines. One serves most tests; those that change engines for good have their own."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.vllm_world import World, world


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """One prefill, one decode and a plain engine, with the 8-layer model, chunks of 256 tokens."""
    work_dir = tmp_path_factory.mktemp("pair")
    chunks = ["--max-num-batched-tokens", "256"]
    async with world(work_dir, model="small", engine_arguments=chunks, router_arguments=["--no-reuse"]) as there:
        yield there


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def all_blocks_come_back(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Rule 3 after every test: no block stays in use."""
    yield
    if "pair" in request.fixturenames:
        there: World = request.getfixturevalue("pair")
        await there.settled()
