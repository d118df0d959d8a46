"""The HTTP legs of one request: sent, waited for, closed; and what the fleet has to know of each."""

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from kvbus.router.cache import Caching
from kvbus.router.chooser import Chooser
from kvbus.router.core import Dispatch, Leg
from kvbus.router.fleet import Engine
from kvbus.router.guests import Guests
from kvbus.router.http import Exchange, Origin, Request
from kvbus.router.identity import Identity
from kvbus.router.reusing import Reuse
from kvbus.router.settings import RouterSettings
from kvbus_schemas import Post


class Parts(Protocol):
    """What a request needs of its router."""

    settings: RouterSettings
    chooser: Chooser
    guests: Guests
    caching: Caching
    reuse: Reuse

    @property
    def bus_connected(self) -> bool: ...

    async def post(self, posts: Iterable[Post]) -> None: ...

    def origin(self, url: str) -> Origin: ...

    def linger(self, task: "asyncio.Task[None]") -> None: ...

    def retried(self) -> None: ...


class Legs:
    """Those of all dispatches of a request, one after the other."""

    def __init__(self, parts: Parts, request: Request, identity: Identity) -> None:
        self.tried: set[str] = set()
        """Engines that failed this request."""
        self.exchanges: dict[Leg, Exchange] = {}
        self.prefill_task: asyncio.Task[None] | None = None
        """The prefill leg that runs beside its decode leg (mode early)."""
        self._parts = parts
        self._request = request
        self._identity = identity

    async def send(self, dispatch: Dispatch, leg: Leg, body: bytes) -> Exchange:
        """Send a leg and wait for its answer's head. Raises LegError."""
        engine = _engine(dispatch, leg)
        origin = self._parts.origin(engine.http_url)
        dispatch.sent(leg)
        self._parts.chooser.fleet.sent(engine.engine_id, dispatch.work_of(leg))
        exchange = await origin.send(self._request.method, self._request.target, self._identity.leg_headers, body)
        self.exchanges[leg] = exchange
        return exchange

    def over(self, dispatch: Dispatch, leg: Leg) -> None:
        """The leg is done with, one way or another."""
        self._parts.chooser.fleet.finished(_engine(dispatch, leg).engine_id, dispatch.work_of(leg))
        self._abandon(leg)

    def close(self, leg: Leg) -> None:
        """Break the leg off."""
        if leg == "prefill" and self.prefill_task is not None:
            self.prefill_task.cancel()
        self._abandon(leg)

    def engine_failed(self, dispatch: Dispatch, leg: Leg) -> None:
        """Neither this request nor, for a while, another one goes to that engine."""
        engine_id = _engine(dispatch, leg).engine_id
        self.tried.add(engine_id)
        self._parts.chooser.fleet.failed(engine_id, time.monotonic())

    def _abandon(self, leg: Leg) -> None:
        exchange = self.exchanges.get(leg)
        if exchange is not None:
            exchange.abandon()


def _engine(dispatch: Dispatch, leg: Leg) -> Engine:
    engine = dispatch.prefill if leg == "prefill" else dispatch.decode
    assert engine is not None
    return engine
