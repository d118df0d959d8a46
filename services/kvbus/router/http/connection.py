"""One client's connection: aiohttp's, watched for heads that are too long or too slow, and refused with our JSON."""

import asyncio
import http
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

if TYPE_CHECKING:
    from kvbus.router.http.server import Server

LINGER_S = 1.0
"""How long a refused client may still send, in seconds: closing at once would destroy the refusal on its way."""
BAD_REQUEST = 400
SERVER_FAULT = 500
HEAD_END = b"\r\n\r\n"
FIELDS_MAX = 256


class Connection(web.RequestHandler):
    """aiohttp parses, queues what is sent ahead, and cancels the handler when the client leaves."""

    __slots__ = ("_head_bytes", "_head_since_s", "_last", "_owner", "_refused", "busy")

    def __init__(self, owner: "Server", manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        limits = owner.limits
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=limits.idle_timeout_s,
            access_log=cast(Any, None),  # aiohttp's own way to have none
            max_line_size=limits.header_bytes_max,
            max_field_size=limits.header_bytes_max,
            max_headers=FIELDS_MAX,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        self._owner = owner
        self._head_bytes = 0
        self._head_since_s = 0.0
        self._last = b""
        self._refused = False
        self.busy = False
        """A request is being read or answered."""

    def began(self) -> None:
        """A request's head is complete."""
        self.busy = True

    def done(self) -> None:
        """The request is answered: a new head may come."""
        self.busy = False
        self._head_bytes = 0
        self._last = b""

    def refuse_if_late(self, now_s: float) -> None:
        """Refuse a head that takes too long to arrive."""
        most_s = self._owner.limits.read_timeout_s
        if self._head_bytes > 0 and not self.busy and now_s - self._head_since_s > most_s:
            self.refuse(408, "request_timeout", f"the request did not arrive within {most_s:g} s")

    def refuse(self, status: int, code: str, message: str) -> None:
        """Answer, without a request, and close when the client has stopped sending."""
        transport = self.transport
        if self._refused or transport is None:
            return
        self._refused = True
        body = self._owner.refusal(status, code, message)
        head = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", "content-type: application/json"]
        head += [f"content-length: {len(body)}", "connection: close", *(["retry-after: 1"] if status == 503 else [])]  # noqa: PLR2004
        transport.write("\r\n".join([*head, "", ""]).encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    # aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._owner.is_full:
            self.refuse(503, "too_many_connections", "this router takes no more connections: try again shortly")

    def data_received(self, data: bytes) -> None:
        if self._head_bytes >= 0 and not self.busy:
            self._watch_head(data)
        if not self._refused:
            super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = SERVER_FAULT,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if isinstance(exc, LineTooLong):
            return self._owner.refused(431, "headers_too_large", self._too_long())
        if status == BAD_REQUEST:
            return self._owner.refused(400, "bad_http", "this is no HTTP/1.1 request")
        text = "the router failed on this request: its log has the reason"
        return self._owner.refused(SERVER_FAULT, "internal_error", text)

    def _watch_head(self, data: bytes) -> None:
        """Count the bytes up to the end of the head; -1 stands for its end."""
        if not self._head_bytes:
            self._head_since_s = self._owner.now_s()
        found = (self._last + data).find(HEAD_END)
        self._head_bytes += len(data) if found < 0 else found - len(self._last)
        self._last = (self._last + data)[1 - len(HEAD_END) :]
        if self._head_bytes > self._owner.limits.header_bytes_max:
            self.refuse(431, "headers_too_large", self._too_long())
        elif found >= 0:
            self._head_bytes = -1

    def _too_long(self) -> str:
        most = self._owner.limits.header_bytes_max
        return f"the request's headers are over {most} bytes: send fewer or shorter"
