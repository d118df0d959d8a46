"""One exchange: a request that was sent and the response that comes."""

import asyncio
from typing import Literal, Protocol

from kvbus.router.http.wire import Headers

BUFFERED_BYTES_MAX = 256 * 1024
"""What an exchange holds before anybody reads it; beyond it the socket is left unread."""

Failure = Literal["connect", "lost", "protocol", "too_large"]


class Carrier(Protocol):
    """The connection, as its exchange sees it."""

    def readable(self) -> asyncio.ReadTransport: ...

    def close(self) -> None: ...


class LegError(Exception):
    """The other side could not be reached, broke off or spoke no HTTP."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure: Failure = failure


class Sink(Protocol):
    """Where a body is piped to."""

    def write(self, data: bytes) -> None: ...

    def throttle(self, source: asyncio.ReadTransport | None) -> None: ...


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_held_bytes",
        "_held_bytes_max",
        "_paused",
        "_sink",
        "_waiter",
        "_wants",
        "complete",
        "error",
        "head_only",
        "headers",
        "status",
    )

    def __init__(self, connection: Carrier, *, head_only: bool) -> None:
        self._connection: Carrier | None = connection
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._held_bytes_max = BUFFERED_BYTES_MAX
        self._paused = False
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants: Literal["first", "all"] = "first"
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self.error: LegError | None = None
        self.head_only = head_only

    async def first_bytes(self) -> bytes:
        """Wait for the first bytes of the body, or its end; give what has come so far. Raises LegError."""
        if self.error is not None or not self._chunks:
            await self._wait("first")
        return b"".join(self._chunks)

    async def whole(self, bytes_max: int) -> bytes:
        """The whole body. Raises LegError, also on a body over `bytes_max`."""
        self._held_bytes_max = bytes_max
        self._go_on()
        await self._wait("all")
        return b"".join(self._chunks)

    async def pipe(self, sink: Sink) -> None:
        """Write the rest of the body into `sink` as it comes, until its end. Raises LegError."""
        for chunk in self._chunks:
            sink.write(chunk)
        self._chunks.clear()
        if self.complete:
            return
        self._sink = sink
        self._go_on()
        if self._connection is not None:
            sink.throttle(self._connection.readable())  # which stops it at once if the client is behind already
        try:
            await self._wait("all")
        finally:
            sink.throttle(None)

    def abandon(self) -> None:
        """Close the connection unless the exchange is over: the other side sees that nobody listens."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.complete:
            connection.close()

    async def _wait(self, wants: Literal["first", "all"]) -> None:
        if not (self.complete or self.error):
            self._wants = wants
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error

    def _go_on(self) -> None:
        if self._paused and self._connection is not None:
            self._paused = False
            self._connection.readable().resume_reading()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # Called by the connection.

    def take(self, data: bytes) -> None:
        """Some of the body has come."""
        if self._sink is not None:
            self._sink.write(data)
            return
        self._chunks.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._held_bytes_max and self._connection is not None and not self._paused:
            if self._wants == "all":
                self.fail(LegError("too_large", f"a response is over {self._held_bytes_max} bytes"))
                return
            self._paused = True
            self._connection.readable().pause_reading()
        if self._wants == "first":
            self._wake()

    def finish(self) -> None:
        """The body has ended."""
        self.complete = True
        self._connection = None
        self._wake()

    def fail(self, error: LegError) -> None:
        """The exchange has broken."""
        if not self.complete and self.error is None:
            self.error = error
            self.abandon()
            self._wake()
