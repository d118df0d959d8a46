"""A request as a handler sees it, and the reply that it writes."""

import asyncio
from typing import Protocol

import msgspec

from kvbus.router.http.wire import Headers, response_head


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one listening process takes."""

    header_bytes_max: int = 32 * 1024
    body_bytes_max: int = 8 * 1024 * 1024
    connections_max: int = 4096
    idle_timeout_s: float = 75.0
    """A connection on which nothing is asked for so long is closed."""
    read_timeout_s: float = 30.0
    """A request must have arrived completely after so long."""
    pipelined_max: int = 16
    """Requests that a client may send ahead on one connection."""


class Request:
    """One whole request. Header names are lower case."""

    __slots__ = ("arrived_s", "body", "chunks", "headers", "keep_alive", "method", "path", "target", "version")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        """time.monotonic() when the request was complete; a loop's clock may count in whole milliseconds."""
        self.method = b""
        self.target = b""
        self.path = b""
        """The target without its query."""
        self.version = "1.1"
        self.headers: Headers = []
        self.chunks: list[bytes] = []
        self.body = b""
        self.keep_alive = False

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Wire(Protocol):
    """What a reply needs of its connection."""

    def send(self, data: bytes) -> None: ...

    def throttle(self, source: asyncio.ReadTransport | None) -> None: ...

    def abort(self) -> None: ...


class Reply:
    """The answer to one request: `start`, any number of `write`, `end`. The head leaves with the first bytes."""

    __slots__ = ("_chunked", "_head", "_no_body", "_wire", "ended", "keep_alive", "last", "started", "status")

    def __init__(self, wire: Wire, request: Request) -> None:
        self._wire = wire
        self._head = b""
        self._no_body = request.method == b"HEAD"
        self._chunked = request.version != "1.0"
        self.keep_alive = request.keep_alive
        self.started = False
        self.ended = False
        self.status = 0
        self.last = b""
        """The bytes that were written last."""

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Begin; `length` is the body's in bytes, None for a stream of unknown length."""
        assert not self.started
        self.started = True
        self.status = status
        framing = b""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
            self._chunked = False
        elif self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False  # HTTP/1.0: the body ends with the connection
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        self._head = response_head(status, headers, framing)

    def write(self, data: bytes) -> None:
        """Some of the body."""
        if not data or self._no_body:
            return
        self.last = data
        head, self._head = self._head, b""
        self._wire.send(b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + data)

    def end(self, data: bytes = b"") -> None:
        """The last of the body."""
        self.ended = True
        self.write(data)
        if self._chunked and not self._no_body:
            self._wire.send(self._head + b"0\r\n\r\n")
        elif self._head:
            self._wire.send(self._head)
        self._head = b""

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer at once."""
        self.start(status, headers, len(body))
        self.end(body)

    def break_off(self) -> None:
        """End in the middle, visibly: the client sees an incomplete message."""
        self._wire.abort()

    def throttle(self, source: asyncio.ReadTransport | None) -> None:
        """Let `source` be read only as fast as the client reads; None ends that."""
        self._wire.throttle(source)
