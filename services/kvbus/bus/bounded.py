"""Limits and ends that hold. nats-py retries inside `except` clauses, and `asyncio.wait_for` of Python 3.11 loses a
cancellation that comes in the same moment as its result: `asyncio.timeout` cancels once, and then may wait for ever."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

CANCELS_MAX = 20
CANCEL_EVERY_S = 0.05

log = structlog.get_logger(__name__)


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks until they are done, for a second at the most. One cancellation is not enough: a task that is told
    by its `finally` clause that NATS is away has that error in the place of its cancellation, and tries again."""
    left = {task for task in tasks if not task.done()}
    for _ in range(CANCELS_MAX):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_EVERY_S)
    if left:
        log.error("tasks_not_cancelled", tasks=sorted(task.get_name() for task in left))


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; TimeoutError when it takes longer than `timeout_s` and a second at the most."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        late = not task.done()
        await end(task)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if late and (not task.done() or task.cancelled() or task.exception() is not None):
        raise TimeoutError
    return task.result()
