"""A matcher process from its start to its end."""

import asyncio
import contextlib
from time import monotonic

import structlog

from kvbus.bus import Bus
from kvbus.errors import BusError
from kvbus.matcher.lease import Lease
from kvbus.matcher.metrics import readings
from kvbus.matcher.partition import Partition
from kvbus.matcher.service import MATCHER, TICK_S, MatcherService
from kvbus.matcher.settings import MatcherSettings
from kvbus.metrics import catalogue
from kvbus.metrics.page import serve_page
from kvbus.process import new_incarnation, process_name
from kvbus_schemas import subjects

log = structlog.get_logger(__name__)


async def serve(settings: MatcherSettings, stopping: asyncio.Event) -> None:
    """Run a matcher until `stopping`. Raises BusError when the bus cannot be reached at the start."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings, name=process_name(MATCHER), incarnation=new_incarnation())
        stack.push_async_callback(bus.close)
        leases = await bus.bucket(subjects.LEASES_BUCKET)
        lease = Lease(leases, Partition.parse(settings.partition).lease_key, bus.name)
        service = MatcherService(bus, settings, lease)
        await service.start()
        if settings.metrics_port:
            stop = serve_page(
                lambda: readings(service, bus),
                (*catalogue.BUS, *catalogue.MATCHER),
                host=settings.metrics_host,
                port=settings.metrics_port,
            )
            stack.push_async_callback(asyncio.to_thread, stop)
        log.info("matcher_ready", name=bus.name, nats=settings.nats, partition=settings.partition)
        await _run(service, lease, stopping)
        with contextlib.suppress(BusError):
            await lease.give_up()


async def _run(service: MatcherService, lease: Lease, stopping: asyncio.Event) -> None:
    async def keep_lease() -> None:
        while True:
            await lease.step(monotonic())
            await asyncio.sleep(lease.pause_s)

    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_lease(), name="matcher-lease")
        while not stopping.is_set():
            await service.tick()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), TICK_S)
        keeping.cancel()
