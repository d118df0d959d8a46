"""A console from its start to its end."""

import asyncio
import contextlib

import structlog
from aiohttp import web

from kvbus.console.core import ConsoleCore
from kvbus.console.feed import Feed
from kvbus.console.hub import Hub
from kvbus.console.settings import ConsoleSettings
from kvbus.console.web import application
from kvbus.errors import ConfigError

SHUTDOWN_S = 1.0
"""Open pages are cut off after so long: they come back by themselves."""

log = structlog.get_logger(__name__)


async def serve(settings: ConsoleSettings, stopping: asyncio.Event) -> None:
    """Serve the page until `stopping`, whether NATS is there or not. Raises ConfigError if the address is taken."""
    core = ConsoleCore(settings.requests_max)
    feed = Feed(settings, core)
    hub = Hub(core, feed, settings.browsers_max)
    runner = web.AppRunner(application(settings, core, feed, hub), access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
        host, port = runner.addresses[0][:2]
        log.info("console_ready", url=f"http://{host}:{port}/")
        stack.push_async_callback(feed.close)
        tasks = [asyncio.create_task(feed.run()), asyncio.create_task(hub.run())]
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stop, *tasks):
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
