"""ASGI middleware of an engine's HTTP server: a bad ticket gets a clear 400 before it reaches the engine.

Without it (vLLM started by plain `--kv-transfer-config`) the connector ignores a bad ticket and the engine serves
the request without a transfer.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvbus_schemas import TicketError, ticket_from_params

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES_MAX = 64 * 1024 * 1024
MARK = b'"kvbus"'


class TicketGuard:
    """Checks `kv_transfer_params.kvbus` of every POST."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.engine_id = os.environ.get("KVBUS_TICKET_ENGINE", "")
        self.incarnation = os.environ.get("KVBUS_TICKET_INCARNATION", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        error = self._why_bad(body)
        if error:
            await _refuse(send, error)
            return
        await self.app(scope, _again(body, receive), send)

    def _why_bad(self, body: bytes) -> str:
        if MARK not in body:
            return ""
        try:
            parsed = json.loads(body)
            ticket = ticket_from_params(parsed.get("kv_transfer_params")) if isinstance(parsed, dict) else None
            if ticket is not None:
                ticket.check(self.engine_id, self.incarnation)
        except TicketError as error:
            return str(error)
        except (ValueError, RecursionError):
            return ""  # not JSON: vLLM says so itself
        return ""


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(chunks)
        chunks.append(message.get("body", b""))
        if not message.get("more_body") or sum(map(len, chunks)) > BODY_BYTES_MAX:
            return b"".join(chunks)


def _again(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Send, error: str) -> None:
    body = json.dumps({"error": {"message": error, "type": "invalid_ticket", "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
