"""The server half: takes whole requests, hands each to one task, and cancels that task when the client leaves.

A request's body is read completely (up to a limit) before its handler starts, since the router rewrites it. The socket
is read on while a handler runs, so that a client that leaves is noticed at once; what arrives meanwhile (pipelining)
waits in a short queue.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvbus.router.http.connection import Connection
from kvbus.router.http.messages import Reply, Request, ServerLimits

Handler = Callable[[Request, Reply], Coroutine[Any, Any, None]]

__all__ = ["Handler", "Reply", "Request", "Server", "ServerLimits"]

SWEEP_S = 1.0
"""How often idle and slow connections are looked for, in seconds."""


class ServerCounters(msgspec.Struct):
    """What the server has turned away by itself."""

    refused_connections: int = 0
    refused_requests: int = 0
    idle_closed: int = 0


class Server:
    """Listens on one address. `refusal` makes the body of an answer that the server gives by itself."""

    def __init__(self, handler: Handler, limits: ServerLimits, refusal: Callable[[int, str, str], bytes]) -> None:
        self.handler = handler
        self.limits = limits
        self.refusal = refusal
        self.counters = ServerCounters()
        self.connections: set[Connection] = set()
        self.draining = False
        self.host = ""
        self.port = 0
        self._left = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, *, shared_port: bool = False) -> None:
        """Listen; port 0 takes a free one. `shared_port` lets several processes listen on the same port."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self, loop), host, port, reuse_port=shared_port or None, backlog=1024
        )
        self.host, self.port = self._listener.sockets[0].getsockname()[:2]
        self._sweeper = loop.create_task(self._sweep())

    async def drain(self, timeout_s: float) -> int:
        """Take no more, let what runs finish for up to `timeout_s`, then break off the rest; give their number."""
        self.draining = True
        self._stop_listening()
        for connection in list(self.connections):
            connection.close_if_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._left.clear()
                    await self._left.wait()
        left = len(self.connections)
        await self.close()
        return left

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self._left.set()

    async def close(self) -> None:
        """Break off everything now."""
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in list(self.connections):
                connection.close_if_late(loop.time())


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind without listening, so that workers that share the port can learn which one it is. Close it at the end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    return sock
