"""A time limit that holds. nats-py retries inside `except` clauses, and `asyncio.wait_for` of Python 3.11 loses a
cancellation that comes in the same moment as its result: `asyncio.timeout` cancels once, and then may wait for ever."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

CANCELS_MAX = 20
CANCEL_EVERY_S = 0.05

log = structlog.get_logger(__name__)


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; TimeoutError when it takes longer than `timeout_s` and a second at the most."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        late = not task.done()
        for _ in range(CANCELS_MAX):
            if task.done():
                break
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_EVERY_S)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        log.error("task_not_cancelled", work=getattr(work, "__qualname__", repr(work)))
    if late and (not task.done() or task.cancelled() or task.exception() is not None):
        raise TimeoutError
    return task.result()
