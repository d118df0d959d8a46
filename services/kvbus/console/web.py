"""The HTTP side: one page, its events, and what it asks for. GET only; nothing here changes anything."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvbus.console.core import ConsoleCore, Filter
from kvbus.console.feed import Feed
from kvbus.console.hub import Hub, TooManyBrowsersError
from kvbus.console.metrics import Metrics
from kvbus.console.settings import ConsoleSettings
from kvbus.trace.core import OUTCOMES, AmbiguousIdError

ID_CHARS_MAX = 256
WRITE_MAX_S = 30.0
"""A browser that takes nothing for so long is let go; it comes back by itself."""
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(settings: ConsoleSettings, core: ConsoleCore, feed: Feed, hub: Hub) -> web.Application:
    """The whole of it."""
    console = _Console(core, feed, hub)
    app = web.Application(middlewares=[_guard(settings)])
    app.on_response_prepare.append(_add_headers)
    get = [(path, _file(name)) for path, name in _pages()]
    get += [
        ("/events", console.events),
        ("/api/transfer", console.transfer),
        ("/api/conversation", console.conversation),
        ("/api/find", console.find),
        ("/healthz", console.health),
        ("/health", console.health),
        ("/metrics", console.metrics),
    ]
    app.add_routes([web.get(path, handler, allow_head=False) for path, handler in get])
    return app


def _pages() -> list[tuple[str, str]]:
    names = sorted(entry.name for entry in _page_files().iterdir() if entry.name.rpartition(".")[2] in KINDS)
    return [("/" if name == "index.html" else f"/{name}", name) for name in names]


def _page_files() -> Any:
    return resources.files("kvbus.console") / "page"


def _file(name: str) -> Handler:
    body = (_page_files() / name).read_bytes()
    tag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    kind = KINDS[name.rpartition(".")[2]]

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return answer


def _guard(settings: ConsoleSettings) -> Any:
    """Headers on every answer, errors as JSON, and no page of elsewhere that names itself as us (DNS rebinding)."""
    allowed = {*LOOPBACK, *(name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip())}
    local_only = settings.host in LOOPBACK

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.host.rpartition(":")[0] if not request.host.endswith("]") else request.host
        name = (host or request.host).strip("[]").lower()
        if local_only and name not in allowed:
            return _problem(403, f"this console is not called {name[:80]!r}: add it to KVBUS_CONSOLE_ALLOWED_HOSTS")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _problem(error.status, error.reason)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        return response

    return guard


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _problem(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-store"}
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )


class _Console:
    def __init__(self, core: ConsoleCore, feed: Feed, hub: Hub) -> None:
        self._core, self._feed, self._hub = core, feed, hub
        self._metrics = Metrics(core, feed, hub)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: first the whole state, then what changes."""
        try:
            wanted = msgspec.convert(dict(request.query), Filter, strict=False)
        except msgspec.ValidationError as error:
            return _problem(400, str(error))
        if wanted.outcome and wanted.outcome not in OUTCOMES:
            return _problem(400, f"no transfer ends so: choose one of {', '.join(OUTCOMES)}")
        try:
            with self._hub.joined(wanted) as browser:
                return await self._stream(request, browser.frames())
        except TooManyBrowsersError:
            return _problem(503, "too many open pages: close some, or raise KVBUS_CONSOLE_BROWSERS_MAX")

    async def _stream(self, request: web.Request, frames: Any) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        try:
            async for sections in frames:
                now = b'"now":%.3f' % self._feed.now_s()
                parts = [now, *(b'"%s":%s' % (name.encode(), value) for name, value in sections.items())]
                async with asyncio.timeout(WRITE_MAX_S):
                    await response.write(b"data: {%s}\n\n" % b",".join(parts))
        except (ConnectionError, TimeoutError):
            pass  # the page was closed, or its machine sleeps
        return response

    async def transfer(self, request: web.Request) -> web.StreamResponse:
        """All about one dispatch."""
        transfer_id = _id(request)
        lines = await self._feed.stamped(self._core.book.lines_of(transfer_id))
        found = self._core.dispatch(transfer_id, lines)
        return _json(found) if found is not None else _unknown(transfer_id)

    async def conversation(self, request: web.Request) -> web.StreamResponse:
        """The turns of a conversation."""
        found = self._core.conversation(_id(request))
        return _json(found) if found is not None else _unknown(_id(request))

    async def find(self, request: web.Request) -> web.StreamResponse:
        """What has this id, or begins so."""
        try:
            found = self._core.find(_id(request))
        except AmbiguousIdError as error:
            return _problem(409, str(error))
        return _json(found) if found is not None else _unknown(_id(request))

    async def health(self, _request: web.Request) -> web.StreamResponse:
        """200 while the bus is there."""
        state = self._feed.section()
        told = {name: state[name] for name in ("connected", "catching_up", "problem")}
        return _json(told, 200 if state["connected"] else 503)

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        """Prometheus."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _id(request: web.Request) -> str:
    given = request.query.get("id", "")[:ID_CHARS_MAX]
    if not given:
        raise web.HTTPBadRequest(reason="say which: ?id=ID")
    return given


def _unknown(given: str) -> web.Response:
    return _problem(
        404, f"nothing here is called {given!r}: the trace goes further back, see kvbus trace ls --since 1d"
    )
