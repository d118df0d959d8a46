"""One client's connection: bytes to requests, one after the other, and replies back to bytes."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

import httptools

from kvbus.router.http.messages import Reply, Request, ServerLimits

LINGER_S = 1.0
"""How long a refused client may still send, in seconds: closing at once would destroy the refusal on its way."""


class Owner(Protocol):
    """The server, as its connections see it."""

    handler: Callable[[Request, Reply], Coroutine[Any, Any, None]]
    limits: ServerLimits
    refusal: Callable[[int, str, str], bytes]
    counters: Any
    connections: "set[Connection]"
    draining: bool

    def lost(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1 with one client."""

    __slots__ = (
        "_full",
        "_head_bytes",
        "_heard_at",
        "_loop",
        "_owner",
        "_parser",
        "_reading",
        "_reading_since",
        "_refused",
        "_reply",
        "_size",
        "_source",
        "_transport",
        "_waiting",
        "task",
    )

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._reading: Request | None = None
        self._reading_since = 0.0
        self._head_bytes = 0
        self._size = 0
        self._waiting: deque[Request] = deque()
        self._reply: Reply | None = None
        self._source: asyncio.ReadTransport | None = None
        self._full = False
        self._refused: tuple[int, str, str] | None = None
        self._heard_at = loop.time()
        self.task: asyncio.Task[None] | None = None

    # For the server

    def close_if_idle(self) -> None:
        """Close unless a request is being answered."""
        if self.task is None and self._transport is not None:
            self._transport.close()

    def close_if_late(self, now_s: float) -> None:
        """Close what has idled too long; refuse a request that takes too long to arrive."""
        limits = self._owner.limits
        if self.task is not None or self._refused:
            return
        if self._reading is not None:
            if now_s - self._reading_since > limits.read_timeout_s:
                self._refuse(408, "request_timeout", f"the request did not arrive within {limits.read_timeout_s:g} s")
                self._answer_refusal()
        elif now_s - self._heard_at > limits.idle_timeout_s:
            self._owner.counters.idle_closed += 1
            self.close_if_idle()

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    # For the reply

    def send(self, data: bytes) -> None:
        """Write to the client; after it has gone, nothing happens."""
        if self._transport is not None:
            self._transport.write(data)

    def throttle(self, source: asyncio.ReadTransport | None) -> None:
        """Read `source` only while the client keeps up."""
        self._source = source
        if self._full:
            self.pause_writing()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        owner = self._owner
        full = len(owner.connections) >= owner.limits.connections_max
        owner.connections.add(self)
        if full or owner.draining:
            owner.counters.refused_connections += 1
            self._refuse(503, "too_many_connections", "this router takes no more connections: try again shortly")
            self._answer_refusal()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)
        self._transport = None
        self._source = None
        self._waiting.clear()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self.task is None and not self._refused:
                self._refuse(400, "upgrade_refused", "this router speaks HTTP/1.1 only: do not ask for an upgrade")
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "bad_http", "this is no HTTP/1.1 request")
        self._check_head(len(data))
        if self._refused:
            self._answer_refusal()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._full = True
        if self._source is not None and not self._source.is_closing():
            self._source.pause_reading()

    def resume_writing(self) -> None:
        self._full = False
        if self._source is not None and not self._source.is_closing():
            self._source.resume_reading()

    # httptools

    def on_message_begin(self) -> None:
        self._reading = Request(0.0)
        self._reading_since = self._heard_at
        self._head_bytes = 0
        self._size = 0

    def on_url(self, url: bytes) -> None:
        if self._reading is not None:
            self._reading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not None:
            self._reading.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request = self._reading
        if request is None:
            return
        self._head_bytes = -1
        request.method = self._parser.get_method()
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        request.path = request.target.partition(b"?")[0]
        limits = self._owner.limits
        size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size > limits.header_bytes_max:
            self._refuse_head()
        elif int(request.header(b"content-length") or 0) > limits.body_bytes_max:
            self._refuse_body()
        elif request.header(b"expect") is not None:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._reading is None or self._refused:
            return
        self._size += len(data)
        self._reading.chunks.append(data)
        if self._size > self._owner.limits.body_bytes_max:
            self._refuse_body()

    def on_message_complete(self) -> None:
        request, self._reading = self._reading, None
        if request is None or self._refused:
            return
        request.body = b"".join(request.chunks) if len(request.chunks) != 1 else request.chunks[0]
        request.chunks = []
        request.arrived_s = time.monotonic()
        if self.task is None:
            self._serve(request)
        elif len(self._waiting) < self._owner.limits.pipelined_max:
            self._waiting.append(request)
        else:
            self._refuse(429, "too_many_pipelined", "too many requests were sent ahead on this connection")

    # One request at a time

    def _serve(self, request: Request) -> None:
        request.keep_alive = request.keep_alive and not self._owner.draining
        self._reply = Reply(self, request)
        self.task = self._loop.create_task(self._owner.handler(request, self._reply))
        self.task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self.task = None
        reply, self._reply = self._reply, None
        self._source = None
        self._heard_at = self._loop.time()
        if self._transport is None or reply is None:
            return
        if task.cancelled() or task.exception() is not None or not reply.ended:
            self._failed(reply)
        elif self._refused:
            self._answer_refusal()
        elif not reply.keep_alive or (self._owner.draining and not self._waiting):
            self._transport.close()
        elif self._waiting:
            self._serve(self._waiting.popleft())

    def _failed(self, reply: Reply) -> None:
        """The handler has left its reply unfinished: a fault of ours."""
        if reply.started:
            self.abort()
        else:
            self._refuse(500, "internal_error", "the router failed on this request: its log has the reason")
            self._answer_refusal()

    # Refusals

    def _check_head(self, size: int) -> None:
        if self._reading is not None and self._head_bytes >= 0 and not self._refused:
            self._head_bytes += size
            if self._head_bytes > self._owner.limits.header_bytes_max:
                self._refuse_head()

    def _refuse_head(self) -> None:
        most = self._owner.limits.header_bytes_max
        self._refuse(431, "headers_too_large", f"the request's headers are over {most} bytes: send fewer or shorter")

    def _refuse_body(self) -> None:
        most = self._owner.limits.body_bytes_max
        self._refuse(413, "body_too_large", f"the request's body is over {most} bytes: send a shorter one")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refused = (status, code, message)

    def _answer_refusal(self) -> None:
        """Send the refusal once nothing else is being answered, then close when the client has stopped sending."""
        if self.task is not None or self._refused is None or self._transport is None:
            return
        self._owner.counters.refused_requests += 1
        status, code, message = self._refused
        request = Request(0.0)
        reply = Reply(self, request)
        extra = [(b"retry-after", b"1")] if status in {429, 503} else []
        body = self._owner.refusal(status, code, message)
        reply.whole(status, [(b"content-type", b"application/json"), *extra], body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(LINGER_S, self.abort)
