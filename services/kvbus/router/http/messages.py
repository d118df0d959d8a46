"""A request as a handler sees it, and the reply that it writes."""

import asyncio
import contextlib

import msgspec
from aiohttp import HttpVersion11, web

from kvbus.router.http.wire import Headers, for_aiohttp

LAST_WORDS_S = 1.0
"""How long a reply that breaks off waits for a client that does not read, in seconds."""
SERVER = ("server", "kvbus")
"""Said where the engine does not say what it is."""


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one listening process takes."""

    header_bytes_max: int = 32 * 1024
    body_bytes_max: int = 8 * 1024 * 1024
    connections_max: int = 4096
    idle_timeout_s: float = 75.0
    """A connection on which nothing is asked for so long is closed."""
    read_timeout_s: float = 30.0
    """A request must have arrived completely after so long."""


class Request:
    """One whole request. Header names are lower case."""

    __slots__ = ("arrived_s", "body", "headers", "method", "path", "target")

    def __init__(self, method: bytes, target: bytes, headers: Headers, body: bytes, arrived_s: float) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0]
        """The target without its query."""
        self.headers = headers
        self.body = body
        self.arrived_s = arrived_s
        """time.monotonic() when the request was complete; a loop's clock may count in whole milliseconds."""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Reply:
    """The answer to one request: `whole`, or `start`, any number of `write`, `end`. A write waits for a client that
    is behind, and raises ConnectionError when it has gone."""

    __slots__ = ("_http", "ended", "last", "response")

    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self.response: web.StreamResponse | None = None
        """What the server returns to aiohttp."""
        self.ended = False
        self.last = b""
        """The bytes that were written last."""

    @property
    def started(self) -> bool:
        """True once there is a status."""
        return self.response is not None

    async def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Begin; `length` is the body's in bytes, None for a stream of unknown length. The head leaves at once."""
        response = self.response = web.StreamResponse(status=status, headers=for_aiohttp(headers))
        response.headers.setdefault(*SERVER)
        if length is not None:
            response.content_length = length
        elif self._http.version < HttpVersion11:
            response.force_close()  # the body ends with the connection
        await response.prepare(self._http)

    async def write(self, data: bytes) -> None:
        """Some of the body."""
        assert self.response is not None
        self.last = data
        await self.response.write(data)

    async def end(self, data: bytes = b"") -> None:
        """The last of the body."""
        assert self.response is not None
        self.ended = True
        await self.response.write_eof(data)

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer at once. It leaves when the handler returns."""
        assert self.response is None
        self.response = web.Response(status=status, headers=for_aiohttp(headers), body=body)
        self.response.headers.setdefault(*SERVER)
        self.ended = True

    async def end_early(self, data: bytes) -> None:
        """End in the middle with these last words, for a client that understands them; then close the connection."""
        assert self.response is not None
        self.response.force_close()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.end(data)
                return
        self.break_off()

    def break_off(self) -> None:
        """End in the middle, visibly: the client sees an incomplete message."""
        if self._http.transport is not None:
            self._http.transport.abort()
