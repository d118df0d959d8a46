"""Blocks in use and held for conversations while a benchmark runs, from the engines' own reports on the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from kvbus import process
from kvbus.bus import Bus, BusSettings
from kvbus.errors import BusError
from kvbus_schemas import LoadReported, Message, subjects

SAMPLE_S = 0.1
REPORTS_WAIT_S = 2.5
"""An engine reports at least every 2 s."""


class Memory(msgspec.Struct):
    """Samples, each over all engines, in percent of their blocks. Held blocks are those that are kept for
    conversations, without what others had left there before; they yield where requests need room."""

    used_percent: list[float] = []
    held_percent: list[float] = []


@contextlib.asynccontextmanager
async def watch_memory(nats: str) -> AsyncIterator[Memory]:
    """Sample meanwhile; without a NATS URL there is nothing to sample."""
    memory, last = Memory(), dict[str, LoadReported]()
    if not nats:
        yield memory
        return

    async def hear(message: Message) -> None:
        if isinstance(message, LoadReported):
            last[message.engine_id] = message

    name, incarnation = process.process_name("bench"), process.new_incarnation()
    bus = await Bus.connect(BusSettings(nats=nats), name=name, incarnation=incarnation)
    try:
        await bus.subscribe(subjects.of_kind(LoadReported), hear)
        await asyncio.sleep(REPORTS_WAIT_S)
        sampling = asyncio.create_task(_sample(last, memory))
        yield memory
        sampling.cancel()
    finally:
        with contextlib.suppress(BusError):
            await bus.close()


async def _sample(last: dict[str, LoadReported], into: Memory) -> None:
    before = sum(load.held_blocks for load in last.values())
    while True:
        await asyncio.sleep(SAMPLE_S)
        total = sum(load.total_blocks for load in last.values())
        if total:
            held = sum(load.held_blocks for load in last.values())
            free = sum(load.free_blocks for load in last.values())
            into.used_percent.append(100.0 * (total - free - held) / total)
            into.held_percent.append(100.0 * max(held - before, 0) / total)
