"""An observer process from its start to its end."""

import asyncio
import contextlib

import structlog

from kvbus.bus import Bus
from kvbus.metrics import catalogue
from kvbus.metrics.page import serve_page
from kvbus.observer.service import ObserverService
from kvbus.observer.settings import ObserverSettings
from kvbus.process import new_incarnation, process_name

OBSERVER = "observer"

log = structlog.get_logger(__name__)


async def serve(settings: ObserverSettings, stopping: asyncio.Event) -> None:
    """Run an observer until `stopping`. Raises BusError when the bus cannot be reached at the start."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings, name=process_name(OBSERVER), incarnation=new_incarnation())
        stack.push_async_callback(bus.close)
        service = ObserverService(bus, settings)
        await service.start()
        stop = serve_page(
            service.readings,
            (*catalogue.BUS, *catalogue.OBSERVER),
            host=settings.metrics_host,
            port=settings.metrics_port,
        )
        stack.push_async_callback(asyncio.to_thread, stop)
        log.info("observer_ready", name=bus.name, nats=settings.nats, port=settings.metrics_port)
        await service.run(stopping)
