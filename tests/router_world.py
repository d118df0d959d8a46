"""Real parts for the router's tests: engines as aiohttp servers that do as they are told, a tester on the bus that
keeps every message, and a router in the same loop. Nothing here stands in for code of kvbus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from kvbus.bus import Bus, BusSettings
from kvbus.process import new_incarnation
from kvbus.router.policies import Policy
from kvbus.router.service import Router
from kvbus.router.settings import RouterSettings
from kvbus_schemas import AnyMessage, EngineCard, LoadReported, Message, Role, encode, subjects

M = TypeVar("M", bound=Message)
CARD_TTL_S = 6.0
TEST_TTL_S = 60.0
"""Cards here are not renewed; engines take them away when they stop."""
WAIT_S = 5.0
SSE = {"content-type": "text/event-stream; charset=utf-8"}
COMPLETION = {"prompt": "a b c", "max_tokens": 4}

Act = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def until(holds: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Wait until `holds()` is true; its value."""
    async with asyncio.timeout(timeout_s):
        while not (value := holds()):  # noqa: ASYNC110  (anything may be waited for)
            await asyncio.sleep(0.005)
    return value


class Seen:
    """A request that an engine got."""

    def __init__(self, request: web.Request, raw: bytes) -> None:
        self.path = request.path_qs
        self.method = request.method
        self.headers = request.headers.copy()
        self.raw = raw
        self.body: dict[str, Any] = msgspec.json.decode(raw) if raw[:1] == b"{" else {}
        self.left = False
        """The router has closed the connection before the answer was complete."""

    @property
    def ticket(self) -> dict[str, Any]:
        """The ticket in the body."""
        ticket: dict[str, Any] = self.body["kv_transfer_params"]["kvbus"]
        return ticket


class Engine:
    """An engine that answers with `act`."""

    def __init__(self, engine_id: str, role: Role, *, model: str = "tiny", compat_hash: str = "") -> None:
        self.engine_id = engine_id
        self.role: Role = role
        self.model = model
        self.compat_hash = compat_hash
        self.incarnation = new_incarnation()
        self.seen: list[Seen] = []
        self.act: Act = answered
        self.url = ""
        self.bus: Bus | None = None
        self._runner: web.AppRunner | None = None

    async def listen(self, port: int = 0) -> None:
        """Serve HTTP."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def join(self, nats: str) -> None:
        """Be on the bus."""
        self.bus = await Bus.connect(BusSettings(nats=nats), name=self.engine_id, incarnation=self.incarnation)
        await self.announce()

    async def announce(self, *, draining: bool = False) -> None:
        """Put the card into its bucket."""
        assert self.bus is not None
        card = EngineCard(
            engine_id=self.engine_id,
            role=self.role,
            model=self.model,
            http_url=self.url,
            block_size=16,
            num_blocks=100,
            compat_hash=self.compat_hash,
            draining=draining,
        )
        bucket = await self.bus.bucket(subjects.ENGINES_BUCKET, ttl_hint_s=CARD_TTL_S)
        await bucket.put(self.engine_id, encode(self.bus.envelope(card)), ttl_s=TEST_TTL_S)

    async def report(self, *, running: int, waiting: int = 0, held_blocks: int = 0) -> None:
        """Report a load."""
        assert self.bus is not None
        load = LoadReported(
            engine_id=self.engine_id,
            running=running,
            waiting=waiting,
            free_blocks=50,
            total_blocks=100,
            held_blocks=held_blocks,
        )
        await self.bus.publish(load, "all")

    async def withdraw(self) -> None:
        """Take the card away."""
        assert self.bus is not None
        bucket = await self.bus.bucket(subjects.ENGINES_BUCKET, ttl_hint_s=CARD_TTL_S)
        await bucket.delete(self.engine_id)

    async def die(self) -> None:
        """Stop listening and break every connection, without a word on the bus."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def stop(self) -> None:
        """Leave."""
        await self.die()
        if self.bus is not None:
            if self.bus.connected:
                with contextlib.suppress(Exception):
                    await self.withdraw()
            await self.bus.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request, await request.read())
        self.seen.append(seen)
        try:
            return await self.act(request)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.left = True
            raise


async def answered(request: web.Request) -> web.StreamResponse:
    """A short answer, streamed if that is asked for."""
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
    if b'"stream":true' in (await request.read()).replace(b" ", b""):
        return await streamed(b'data: {"choices":[{"text":"ok"}]}\n\n', b"data: [DONE]\n\n")(request)
    return web.json_response({"choices": [{"text": "ok"}], "url": str(request.url)})


def streamed(*chunks: bytes, pause: asyncio.Event | None = None, then: str = "") -> Act:
    """Stream `chunks`; wait for `pause` after the first one; `then` "die": break off at the end."""

    async def act(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for number, chunk in enumerate(chunks):
            await response.write(chunk)
            if number == 0 and pause is not None:
                await pause.wait()
        if then == "die":
            assert request.transport is not None
            request.transport.abort()
        await response.write_eof()
        return response

    return act


def status(code: int, message: str = "engine says no") -> Act:
    """Answer with an error."""

    async def act(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "type": "x", "code": code}}, status=code)

    return act


async def hang(_request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def broken(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class World:
    """Engines, routers and a tester on one NATS; all of it ends with the `async with`."""

    def __init__(self, nats: str) -> None:
        self.nats = nats
        self.messages: list[AnyMessage] = []
        """What was said on the bus, in order, except for presence."""
        self.router: Router
        self._engines: list[Engine] = []
        self._routers: list[Router] = []
        self._taps: list[Bus] = []
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        tap = await Bus.connect(BusSettings(nats=self.nats), name="tap", incarnation="i")
        self._taps.append(tap)
        await tap.subscribe(subjects.everything(), self._hear)
        return self

    def _hear(self, message: AnyMessage) -> None:
        if message.PLANE != "presence":
            self.messages.append(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()
        for router in self._routers:
            await router.close()
        for engine in self._engines:
            await engine.stop()
        for tap in self._taps:
            await tap.close()
        await asyncio.sleep(0)

    async def engine(self, role: Role, engine_id: str = "", **given: Any) -> Engine:
        """An engine on the bus."""
        engine = Engine(engine_id or f"{role}-{len(self._engines)}", role, **given)
        self._engines.append(engine)
        await engine.listen()
        await engine.join(self.nats)
        return engine

    async def stock(self, role: Role) -> Engine:
        """A stock engine: on no bus."""
        engine = Engine(f"stock-{role}", role)
        self._engines.append(engine)
        await engine.listen()
        return engine

    async def start(self, *, own_policy: Policy | None = None, **given: Any) -> Router:
        """A router that knows the engines of now."""
        settings = msgspec.convert({"nats": self.nats, "port": 0, "policy": "round_robin"} | given, RouterSettings)
        self.router = Router(
            settings, name=f"router-{len(self._routers)}", incarnation=new_incarnation(), policy=own_policy
        )
        self._routers.append(self.router)
        await self.router.start()
        return self.router

    async def inbox(self, name: str) -> list[AnyMessage]:
        """What is sent to `name` from now on."""
        tap = await Bus.connect(BusSettings(nats=self.nats), name=f"tap-{name}", incarnation="i")
        self._taps.append(tap)
        got: list[AnyMessage] = []
        await tap.subscribe(subjects.addressed_to(name), got.append)
        return got

    def said(self, kind: type[M]) -> list[M]:
        """The messages of one kind so far."""
        return [message for message in self.messages if isinstance(message, kind)]

    @contextlib.asynccontextmanager
    async def post(
        self, body: Any = COMPLETION, *, path: str = "/v1/completions", **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST to the router; `x_kvbus_mode` in `headers` is X-Kvbus-Mode."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.router.url + path, data=data, headers=named) as response:
            yield response

    async def raw(self, data: bytes, *, wait_s: float = WAIT_S) -> bytes:
        """Send bytes to the router; all that comes back until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.server.port)
        try:
            writer.write(data)
            async with asyncio.timeout(wait_s):
                return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
