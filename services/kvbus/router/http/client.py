"""The client half: kept-alive connections to one origin, and one exchange at a time on each.

A body is either collected or piped straight from the parser into a reply, without a task switch per chunk. Nothing is
ever sent twice from here: an exchange that breaks says so, and its caller decides about another one.
"""

import asyncio
import socket
import ssl
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvbus.router.http.exchange import Exchange, LegError

IDLE_S = 4.0
"""Age in seconds at which a kept connection is given up: uvicorn, and with it vLLM, closes at 5."""
FINAL = 200
"""Statuses below it (100 Continue and its kin) are no answers yet."""
KEPT_MAX = 256
"""Idle connections kept per origin."""


class Origin:
    """Connections to one scheme, host and port."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.prefix = parts.path.rstrip("/").encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._kept: deque[_Connection] = deque()
        self._open: set[_Connection] = set()

    async def send(self, data: bytes, *, head_only: bool = False) -> Exchange:
        """Send a whole request; the answer is read from the exchange. Raises LegError when nothing answers there."""
        connection = self._idle() or await self._connect()
        return connection.begin(data, head_only=head_only)

    def close(self) -> None:
        """Break every exchange and drop every connection."""
        for connection in list(self._open):
            connection.close()

    def _idle(self) -> "_Connection | None":
        kept = self._kept
        while kept:
            connection = kept.pop()
            if connection.usable(IDLE_S):
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, loop), self.host, self.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            where = f"{self.host}:{self.port}"
            raise LegError("connect", f"{where}: {str(error) or 'no answer in time'}") from error
        return connection

    # Called by the connections.

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def freed(self, connection: "_Connection") -> None:
        """The connection is free again: keep it, and give up one that has idled too long."""
        self._kept.append(connection)
        if len(self._kept) > KEPT_MAX or not self._kept[0].usable(IDLE_S):
            self._kept.popleft().close()

    def lost(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        if connection in self._kept:
            self._kept.remove(connection)


class _Connection(asyncio.Protocol):
    __slots__ = ("_delimited", "_exchange", "_freed_at", "_loop", "_origin", "_parser", "_transport")

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self._origin = origin
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._freed_at = 0.0
        self._delimited = False

    def begin(self, data: bytes, *, head_only: bool) -> Exchange:
        assert self._exchange is None
        assert self._transport is not None
        self._exchange = Exchange(self, head_only=head_only)
        self._delimited = False
        self._transport.write(data)
        return self._exchange

    def readable(self) -> asyncio.ReadTransport:
        assert self._transport is not None
        return self._transport

    def usable(self, idle_s: float) -> bool:
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._loop.time() - self._freed_at < idle_s
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        _keep_alive(self._transport)
        self._origin.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._exchange is not None:
                self._exchange.fail(LegError("protocol", f"no HTTP from {self._origin.host}: {error!r}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._origin.lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exchange.status and not self._delimited and exc is None:
            exchange.finish()  # the body ended with the connection
        else:
            where = f"{self._origin.host}:{self._origin.port}"
            exchange.fail(LegError("lost", f"{where} closed the connection{f' ({exc})' if exc else ''}"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            name = name.lower()
            self._exchange.headers.append((name, value))
            if name in {b"content-length", b"transfer-encoding"}:
                self._delimited = True

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        exchange.status = self._parser.get_status_code()
        if exchange.head_only and exchange.status >= FINAL:
            self._exchange = None
            exchange.finish()
            self.close()

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.take(data)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status < FINAL:  # 100 Continue and its kin
            exchange.status = 0
            exchange.headers.clear()
            return
        self._exchange = None
        if not self.readable().is_reading():
            self.readable().resume_reading()  # stopped by these very last bytes
        if self._parser.should_keep_alive():
            self._freed_at = self._loop.time()
            self._origin.freed(self)
        else:
            self.close()
        exchange.finish()


def _keep_alive(transport: asyncio.Transport) -> None:
    """Let the kernel find out within half a minute that the machine on the other side is gone."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
