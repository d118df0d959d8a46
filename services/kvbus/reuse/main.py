"""A reuse process from its start to its end."""

import asyncio
import contextlib

import structlog

from kvbus.bus import Bus
from kvbus.conversations_client import REUSE
from kvbus.errors import BusError
from kvbus.metrics import catalogue
from kvbus.metrics.page import serve_page
from kvbus.process import new_incarnation, process_name
from kvbus.reuse.metrics import readings
from kvbus.reuse.service import TICK_S, ReuseService
from kvbus.reuse.settings import ReuseSettings

log = structlog.get_logger(__name__)


async def serve(settings: ReuseSettings, stopping: asyncio.Event) -> None:
    """Run a reuse process until `stopping`. Raises BusError when the bus cannot be reached at the start."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings, name=process_name(REUSE), incarnation=new_incarnation())
        stack.push_async_callback(bus.close)
        service = ReuseService(bus, settings)
        await service.start()
        if settings.metrics_port:
            stop = serve_page(
                lambda: readings(service, bus),
                (*catalogue.BUS, *catalogue.REUSE),
                host=settings.metrics_host,
                port=settings.metrics_port,
            )
            stack.push_async_callback(asyncio.to_thread, stop)
        log.info("reuse_ready", name=bus.name, nats=settings.nats, storage=settings.storage)
        await _run(service, stopping)


async def _run(service: ReuseService, stopping: asyncio.Event) -> None:
    catching_up: asyncio.Task[None] = asyncio.create_task(_catch_up(service), name="reuse-catch-up")
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), TICK_S)
        with contextlib.suppress(BusError):  # it is away: the next tick comes
            await service.tick()
    catching_up.cancel()
    await asyncio.wait([catching_up])


async def _catch_up(service: ReuseService) -> None:
    """Beside the answering, so that a long outage delays nobody. A failure costs only what was missed."""
    try:
        await service.catch_up()
    except BusError as error:
        log.warning("reuse_catch_up_failed", error=str(error))
