"""The server half: takes whole requests, hands each to a handler, and cancels it when the client leaves.

A request's body is read completely (up to a limit) before its handler starts, since the router rewrites it.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage

from kvbus.router.http.connection import Connection
from kvbus.router.http.messages import SERVER, Reply, Request, ServerLimits
from kvbus.router.http.wire import lowered

Handler = Callable[[Request, Reply], Coroutine[Any, Any, None]]

SWEEP_S = 1.0
"""How often slow connections are looked for, in seconds."""
CLOSE_MAX_S = 5.0
"""How long handlers that were broken off may take to tidy up, in seconds."""
BACKLOG = 1024
VERSIONS = (HttpVersion10, HttpVersion11)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class RefusedError(Exception):
    """A request that no handler gets to see."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Server:
    """Listens on one address. `refusal` makes the body of an answer that the server gives by itself."""

    def __init__(self, handler: Handler, limits: ServerLimits, refusal: Callable[[int, str, str], bytes]) -> None:
        self.limits = limits
        self.refusal = refusal
        self.draining = False
        self.host = ""
        self.port = 0
        self._handler = handler
        self._answering = 0
        self._idle = asyncio.Event()
        self._manager: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.now_s = time.monotonic

    @property
    def connections(self) -> list[Connection]:
        """Those of now."""
        known = self._manager.connections if self._manager is not None else []
        return [connection for connection in known if isinstance(connection, Connection)]

    @property
    def is_full(self) -> bool:
        """Whether a connection that has just come is one too many."""
        known = self._manager.connections if self._manager is not None else ()
        return self.draining or len(known) > self.limits.connections_max

    async def start(self, host: str, port: int, *, shared_port: bool = False) -> None:
        """Listen; port 0 takes a free one. `shared_port` lets several processes listen on the same port."""
        loop = asyncio.get_running_loop()
        manager = web.Server(self._answer, handler_cancellation=True, request_factory=self._request)
        self._manager = manager
        self._listener = await loop.create_server(
            lambda: Connection(self, manager, loop), host, port, reuse_port=shared_port or None, backlog=BACKLOG
        )
        self.host, self.port = self._listener.sockets[0].getsockname()[:2]
        self._sweeper = loop.create_task(self._sweep())

    async def drain(self, timeout_s: float) -> int:
        """Take no more, let what runs finish for up to `timeout_s`, then break off the rest; give their number."""
        self.draining = True
        self._stop_listening()
        for connection in self.connections:
            if connection.busy:
                connection.close()
            else:
                connection.force_close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until_idle()
        left = self._answering
        await self.close()
        return left

    async def close(self) -> None:
        """Break off everything now."""
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_MAX_S):
                await self._until_idle()

    def refused(self, status: int, code: str, message: str) -> web.Response:
        """The server's own answer to a request, after which it closes the connection."""
        body = self.refusal(status, code, message)
        response = web.Response(status=status, body=body, content_type="application/json", headers=[SERVER])
        response.force_close()
        return response

    # aiohttp

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        most = self.limits.body_bytes_max
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, Connection)
        connection.began()
        self._answering += 1
        try:
            return await self._answered(http)
        except RefusedError as refused:
            return self.refused(refused.status, refused.code, refused.message)
        finally:
            connection.done()
            self._answering -= 1
            self._idle.set()

    async def _answered(self, http: web.BaseRequest) -> web.StreamResponse:
        request = await self._read(http)
        reply = Reply(http)
        try:
            await self._handler(request, reply)
        except ConnectionError:
            if reply.response is None:
                raise
        if reply.response is None:
            raise RuntimeError("a handler has left its request unanswered")
        return reply.response

    async def _read(self, http: web.BaseRequest) -> Request:
        """The whole request. Raises RefusedError."""
        headers = lowered(http.raw_headers)
        self._check_head(http, sum(len(name) + len(value) + 4 for name, value in headers))
        if http.headers.get("expect"):
            await http.writer.write(CONTINUE)
            http.writer.output_size = 0  # the answer has not begun
        try:
            body = b"" if not http.can_read_body else await self._body(http)
        except web.HTTPRequestEntityTooLarge as error:
            raise self._body_too_large() from error
        except TimeoutError as error:
            text = f"the request did not arrive within {self.limits.read_timeout_s:g} s"
            raise RefusedError(408, "request_timeout", text) from error
        except web.RequestPayloadError as error:
            raise RefusedError(400, "bad_http", f"the request's body is broken: {error}") from error
        target = http.raw_path.encode("utf-8", "surrogateescape")
        return Request(http.method.encode("latin-1"), target, headers, body, time.monotonic())

    async def _body(self, http: web.BaseRequest) -> bytes:
        if http.content.is_eof():
            return await http.read()
        async with asyncio.timeout(self.limits.read_timeout_s):
            return await http.read()

    def _check_head(self, http: web.BaseRequest, header_bytes: int) -> None:
        if len(http.raw_path) + header_bytes > self.limits.header_bytes_max:
            text = f"the request's headers are over {self.limits.header_bytes_max} bytes: send fewer or shorter"
            raise RefusedError(431, "headers_too_large", text)
        if http.version not in VERSIONS:  # the parser takes a line without a version for HTTP/0.9
            raise RefusedError(400, "bad_http", "this is no HTTP/1.1 request")
        if not http.raw_path.isascii():
            raise RefusedError(400, "bad_http", "the request's target must be ASCII: percent-encode it")
        if (http.content_length or 0) > self.limits.body_bytes_max:
            raise self._body_too_large()
        if http.headers.get("upgrade", "").lower() == "websocket":
            raise RefusedError(400, "upgrade_refused", "this router speaks HTTP/1.1 only: do not ask for an upgrade")

    def _body_too_large(self) -> RefusedError:
        text = f"the request's body is over {self.limits.body_bytes_max} bytes: send a shorter one"
        return RefusedError(413, "body_too_large", text)

    # Inside

    async def _until_idle(self) -> None:
        while self._answering:
            self._idle.clear()
            await self._idle.wait()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in self.connections:
                connection.refuse_if_late(self.now_s())


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind without listening, so that workers that share the port can learn which one it is. Close it at the end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    return sock
