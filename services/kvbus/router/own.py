"""The pages that a router answers by itself: /health, /metrics, /v1/models."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from kvbus.router.cache import Caching
from kvbus.router.chooser import Chooser
from kvbus.router.fleet import Engine, Fleet
from kvbus.router.gate import Gate
from kvbus.router.http import LegError, Origin, Reply, Request, Server
from kvbus.router.identity import identify
from kvbus.router.metrics import CONTENT_TYPE, Metrics
from kvbus.router.presence import Presence
from kvbus.router.problems import MethodError

MODELS_TIMEOUT_S = 5.0
MODELS_BYTES_MAX = 1024 * 1024
JSON = (b"content-type", b"application/json")
READING = (b"GET", b"HEAD")
OK = 200
UNAVAILABLE = 503


class Owner(Protocol):
    """The router, as its pages see it."""

    fleet: Fleet
    chooser: Chooser
    gate: Gate
    metrics: Metrics
    presence: Presence
    server: Server
    caching: Caching

    def origin(self, url: str) -> Origin: ...


class OwnPages:
    """`answer` any of `pages`."""

    def __init__(self, router: Owner) -> None:
        self._router = router
        self.pages: dict[bytes, Callable[[Request, Reply], Awaitable[None]]] = {
            b"/health": self._health,
            b"/metrics": self._metrics,
            b"/v1/models": self._models,
        }

    async def answer(self, request: Request, reply: Reply) -> None:
        """Answer the page of the request's path. Raises MethodError for what would change it."""
        if request.method not in READING:
            raise MethodError("GET", "HEAD")
        await self.pages[request.path](request, reply)

    def reasons(self) -> list[str]:
        """Why the router cannot serve fully; empty when it can."""
        reasons = []
        router = self._router
        on_bus = not router.fleet.alive("decode", static=True)
        if on_bus and not router.presence.connected:
            reasons.append(f"NATS is not reachable {router.presence.last_error}".strip())
        if not router.fleet.alive("decode"):
            reasons.append("no decode engine is alive: start one with `kvbus engine decode MODEL`")
        if router.server.draining:
            reasons.append("draining")
        return reasons

    async def _health(self, _request: Request, reply: Reply) -> None:
        reasons = self.reasons()
        status = UNAVAILABLE if reasons else OK
        fleet = self._router.fleet
        state = {
            "status": "unavailable" if reasons else "ok",
            "reasons": reasons,
            "nats": self._router.presence.connected,
            "engines": {"prefill": len(fleet.alive("prefill")), "decode": len(fleet.alive("decode"))},
        }
        headers = [JSON, (b"retry-after", b"2")] if reasons else [JSON]
        reply.whole(status, headers, msgspec.json.encode(state))

    async def _metrics(self, _request: Request, reply: Reply) -> None:
        router = self._router
        router.metrics.gauges(
            in_flight=router.gate.in_flight,
            waiting=router.gate.waiting,
            connections=len(router.server.connections),
            bus_connected=router.presence.connected,
            engines={"prefill": len(router.fleet.alive("prefill")), "decode": len(router.fleet.alive("decode"))},
            bus=router.presence.counters,
            held_blocks=router.fleet.held_blocks(),
        )
        router.caching.count()
        reply.whole(OK, [(b"content-type", CONTENT_TYPE)], router.metrics.text())

    async def _models(self, request: Request, reply: Reply) -> None:
        """What the engines list, each model once; a model whose engine does not answer is listed from its card."""
        engines = {engine.model or engine.engine_id: engine for engine in self._router.fleet.alive("decode")}
        lists = await asyncio.gather(*(self._listed(engine, request) for engine in engines.values()))
        found: dict[str, Any] = {}
        for listed in lists:
            for model in listed:
                found.setdefault(str(model.get("id")), model)
        reply.whole(OK, [JSON], msgspec.json.encode({"object": "list", "data": list(found.values())}))

    async def _listed(self, engine: Engine, request: Request) -> list[dict[str, Any]]:
        fallback = [{"id": engine.model, "object": "model", "owned_by": "kvbus"}] if engine.model else []
        origin = self._router.origin(engine.http_url)
        headers = identify(request.headers).leg_headers
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S):
                exchange = await origin.send(b"GET", b"/v1/models", headers)
                answer = await exchange.whole(MODELS_BYTES_MAX)
            if exchange.status != OK:
                return fallback
            return list(msgspec.json.decode(answer, type=dict[str, Any])["data"])
        except (LegError, TimeoutError, msgspec.MsgspecError, KeyError, TypeError):
            return fallback
