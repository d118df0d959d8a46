"""A time limit on nats-py's work holds, also where a cancellation is swallowed on the way."""

import asyncio

import pytest

from kvbus.bus.bounded import end, within
from kvbus.errors import BusError


async def stubborn(swallows: int) -> str:
    """Goes on after so many cancellations, as a loop does that retries on everything."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            swallows -= 1
            if swallows < 0:
                raise


@pytest.mark.parametrize("swallows", [0, 1, 5])
async def test_a_swallowed_cancellation_is_repeated(swallows: int) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            await within(0.01, stubborn(swallows))
    assert [task for task in asyncio.all_tasks() if "stubborn" in repr(task)] == []


async def test_what_is_done_in_time_is_returned_or_raised() -> None:
    async def answer(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    assert await within(10, answer(None)) == 7
    with pytest.raises(KeyError):
        await within(10, answer(KeyError("x")))


async def test_whoever_waits_may_be_cancelled_and_so_is_the_work() -> None:
    waiting = asyncio.create_task(within(60, stubborn(0)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while any("stubborn" in repr(task) for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_task_that_takes_its_end_for_a_lost_connection_is_ended_all_the_same() -> None:
    """As a watch whose last words, in its `finally` clause, do not reach NATS any more."""

    async def follows() -> None:
        last_words = 3
        while True:
            try:
                try:
                    await asyncio.sleep(60)
                finally:
                    last_words -= 1
                    if last_words >= 0:
                        raise BusError("NATS is away")
            except BusError:
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(follows()) for _ in range(3)]
    await asyncio.sleep(0)
    await end(*tasks)
    assert all(task.cancelled() for task in tasks)
