"""The client half: requests to one origin over its kept connections, and their responses, byte by byte.

Nothing that is not idempotent is ever sent twice from here: an exchange that breaks says so, and its caller decides
about another one. An exchange that is abandoned closes its connection, so that the other side sees it.
"""

import io
import socket
from typing import Literal

import aiohttp
from yarl import URL

from kvbus.router.http.wire import Headers, for_aiohttp, lowered

IDLE_S = 4.0
"""Age in seconds at which a kept connection is given up: uvicorn, and with it vLLM, closes at 5."""
READ_BYTES = 64 * 1024
"""What is read ahead of a slow client, twice over, before its engine is held back."""
PLAIN_BODY_BYTES_MAX = 512 * 1024
"""Longer bodies are written piece by piece, so that they do not hold up everybody else."""
ADDED_BY_AIOHTTP = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that must not appear where the client has not sent them."""

Failure = Literal["connect", "lost", "protocol", "too_large"]


class LegError(Exception):
    """The other side could not be reached, broke off or spoke no HTTP."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure: Failure = failure


class Exchange:
    """A response whose head has come."""

    __slots__ = ("_first", "_response", "_where", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse, where: str) -> None:
        self._response = response
        self._where = where
        self._first: bytes | None = None
        self.status = response.status
        self.headers = lowered(response.raw_headers)

    @property
    def complete(self) -> bool:
        """True once every byte of the body has been read."""
        return self._response.content.at_eof()

    async def first_bytes(self) -> bytes:
        """Wait for the first bytes of the body, or its end; they are given by `more` once again. Raises LegError."""
        if self._first is None:
            self._first = await self._read()
        return self._first

    async def more(self) -> bytes:
        """The next bytes, as many as there are; none at the end of the body. Raises LegError."""
        first, self._first = self._first, None
        return await self._read() if first is None else first

    async def whole(self, bytes_max: int) -> bytes:
        """The whole body. Raises LegError, also on a body over `bytes_max`."""
        parts: list[bytes] = []
        size = 0
        while part := await self.more():
            parts.append(part)
            size += len(part)
            if size > bytes_max:
                self.abandon()
                raise LegError("too_large", f"a response is over {bytes_max} bytes")
        return b"".join(parts)

    def abandon(self) -> None:
        """Close the connection unless the exchange is over: the other side sees that nobody listens."""
        self._response.close()

    async def _read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise LegError("lost", f"{self._where} broke off ({error})") from error


class Origin:
    """One scheme, host and port, with the connections to it."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._where = URL(url).authority
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=ADDED_BY_AIOHTTP,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
        )

    async def send(self, method: bytes, target: bytes, headers: Headers, body: bytes = b"") -> Exchange:
        """Send a request and wait for the head of its response. Raises LegError."""
        try:
            response = await self._session.request(
                method.decode("latin-1"),
                URL(self._url + target.decode("utf-8", "surrogateescape"), encoded=True),
                headers=for_aiohttp(headers),
                data=(body if len(body) <= PLAIN_BODY_BYTES_MAX else io.BytesIO(body)) or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise LegError("connect", f"{self._where}: {error}") from error
        except (aiohttp.ClientResponseError, ValueError) as error:
            raise LegError("protocol", f"no HTTP from {self._where}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegError("lost", f"{self._where} closed the connection ({error})") from error
        return Exchange(response, self._where)

    async def close(self) -> None:
        """Break every exchange and drop every connection."""
        await self._session.close()


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose kernel finds out within half a minute that the machine on the other side is gone."""
    sock = socket.socket(info[0], info[1], info[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock
