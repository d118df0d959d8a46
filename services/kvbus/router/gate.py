"""Admission: so many requests at once, so many waiting, and nobody for long."""

import asyncio
from collections import deque

from kvbus.router.problems import BusyError


class Gate:
    """`async with gate:` around a request. Raises BusyError when there is no room to wait, or the wait was too long."""

    def __init__(self, *, in_flight_max: int, waiting_max: int, wait_max_s: float, retry_after_s: int) -> None:
        self.in_flight = 0
        self._in_flight_max = in_flight_max
        self._waiting_max = waiting_max
        self._wait_max_s = wait_max_s
        self._retry_after_s = retry_after_s
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiters)

    async def __aenter__(self) -> None:
        if self.in_flight < self._in_flight_max:
            self.in_flight += 1
            return
        if len(self._waiters) >= self._waiting_max:
            raise BusyError(
                f"{self._waiting_max} requests wait already: try again later, or raise requests_waiting_max",
                code="queue_full",
                status=429,
                retry_after_s=self._retry_after_s,
            )
        await self._wait()

    async def __aexit__(self, *exc: object) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)  # the place goes over: in_flight stays as it is
                return
        self.in_flight -= 1

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._wait_max_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                await self.__aexit__()  # given and not used
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            if isinstance(error, TimeoutError):
                raise BusyError(
                    f"no turn came within {self._wait_max_s:g} s: try again later, or start more engines",
                    code="wait_too_long",
                    retry_after_s=self._retry_after_s,
                ) from None
            raise
