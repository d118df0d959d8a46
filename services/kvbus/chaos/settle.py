"""When nothing is asked any more, every block of every engine must come back."""

import asyncio
import time

from kvbus.chaos.ear import Ear
from kvbus.engine.serve import RESERVED_BLOCKS
from kvbus.local.fleet import Fleet

LOOK_EVERY_S = 0.25


async def settle(fleet: Fleet, ear: Ear, within_s: float) -> dict[str, int]:
    """Blocks that are still in use after `within_s`, by engine, from their load reports."""
    since_s = time.monotonic()
    engines = [engine for engine in fleet.engines if engine.role != "plain"]
    reserved = RESERVED_BLOCKS if fleet.options.engine == "vllm" else 0
    while True:
        lost = {engine.engine_id: in_use(ear, engine.engine_id, reserved, since_s) for engine in engines}
        if not any(lost.values()) or time.monotonic() > since_s + within_s:
            return lost
        await asyncio.sleep(LOOK_EVERY_S)


def in_use(ear: Ear, engine_id: str, reserved: int, since_s: float) -> int:
    """By its newest report since then; all of its blocks, or at least one, when it has sent none."""
    load = ear.loads.get(engine_id)
    if load is None:
        return 1
    if load.at_s < since_s:
        return max(load.report.total_blocks, 1)
    return max(load.report.total_blocks - load.report.free_blocks - reserved, 0)
