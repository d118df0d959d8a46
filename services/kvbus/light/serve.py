"""A light engine from its start to its end. On SIGTERM its card says `draining`, what runs is finished, for at most
`drain_s`, then the card is withdrawn; a second SIGTERM ends it at once (`kvbus.process`)."""

import asyncio
import socket
import time

import msgspec
import structlog
from aiohttp import web

from kvbus.engine.settings import engine_settings
from kvbus.errors import CommandFailed, ConfigError
from kvbus.light.api import Api
from kvbus.light.engine import LightEngine
from kvbus.light.settings import LightSettings
from kvbus.process import new_incarnation
from kvbus_schemas import Role

log = structlog.get_logger()

LOOK_EVERY_S = 0.05
QUIET_S = 0.3
"""How long an engine has nothing to do before it has drained: routers need a moment to hear of it."""


async def serve(settings: LightSettings, role: Role, model: str, stopping: asyncio.Event) -> None:
    """Serve until `stopping`. Raises ConfigError when it cannot listen, CommandFailed when the engine has failed."""
    runner, engine, api = await _start(settings, role, model)
    failed, loop = asyncio.Event(), asyncio.get_running_loop()
    engine.loop.on_failed = lambda: _set(loop, failed)
    log.info("engine_ready", engine_id=engine.identity.engine_id, role=role, url=engine.bus.http_url)
    try:
        ends = {asyncio.create_task(event.wait()) for event in (failed, stopping)}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if failed.is_set():
            raise CommandFailed("the engine's loop has failed: see the log above")
        await _drain(engine, api, settings.drain_s)
    finally:
        await runner.cleanup()
        await asyncio.to_thread(engine.stop)


async def _start(settings: LightSettings, role: Role, model: str) -> tuple[web.AppRunner, LightEngine, Api]:
    """Listen first: the card says where."""
    sock = web_socket(settings.host, settings.port)
    port = sock.getsockname()[1]
    settings = msgspec.structs.replace(settings, port=port, engine_id=settings.engine_id or f"{role}-{port}")
    url = settings.advertise or f"http://{settings.host}:{port}"
    bus = engine_settings({"nats": settings.nats, "http_url": url, "incarnation": new_incarnation()})
    engine = LightEngine(settings, bus, role=role, model=model)
    api = Api(engine)
    runner = web.AppRunner(api.app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    engine.start()
    return runner, engine, api


def web_socket(host: str, port: int) -> socket.socket:
    """A bound socket; 0 takes a free port. Raises ConfigError."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def _drain(engine: LightEngine, api: Api, drain_s: float) -> None:
    """Wait until nothing is served and no transfer holds blocks."""
    engine.drain()
    since_s = busy_s = time.monotonic()
    while (now_s := time.monotonic()) < since_s + drain_s and now_s < busy_s + QUIET_S:
        if api.serving or not engine.loop.idle:
            busy_s = now_s
        await asyncio.sleep(LOOK_EVERY_S)
    complete = not api.serving and engine.loop.idle
    log.info("drained", engine_id=engine.identity.engine_id, complete=complete, s=round(now_s - since_s, 3))
