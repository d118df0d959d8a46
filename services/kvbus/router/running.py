"""Running the router: one process, or several workers that share a port and a supervisor that keeps them together."""

import asyncio
import gc
import os
import sys
import tempfile

import msgspec
import structlog

from kvbus import process
from kvbus.errors import CommandFailed
from kvbus.router.http.server import reserve_port
from kvbus.router.settings import RouterSettings

WORKER_ENV = "KVBUS_ROUTER_WORKER_SETTINGS"
"""Settings of a worker, as JSON, from its supervisor."""
METRICS_ENV = "PROMETHEUS_MULTIPROC_DIR"
STOP_EXTRA_S = 10.0
WORKERS_MAX = 64

log = structlog.get_logger(__name__)


def run(settings: RouterSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError or CommandFailed."""
    if settings.workers <= 1:
        process.run(lambda stopping: serve(settings, stopping, shared_port=False))
    else:
        process.run(lambda stopping: supervise(settings, stopping))


async def serve(settings: RouterSettings, stopping: asyncio.Event, *, shared_port: bool) -> None:
    """One router, until `stopping`; then it drains."""
    from kvbus.router.service import Router

    router = Router(settings, name=process.process_name("router"), incarnation=process.new_incarnation())
    await router.start(shared_port=shared_port)
    _calm_collector()
    await stopping.wait()
    await router.drain()


def _calm_collector() -> None:
    """What is loaded by now stays for good, and a request leaves hardly any cycles behind: collect rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


async def supervise(settings: RouterSettings, stopping: asyncio.Event) -> None:
    """Keep `workers` processes on one port. One that dies ends all: whoever started the router starts it again."""
    with (
        tempfile.TemporaryDirectory(prefix="kvbus-router-metrics-") as metrics,
        reserve_port(settings.host, settings.port) as reserved,
    ):
        own = msgspec.structs.replace(settings, port=reserved.getsockname()[1], workers=1)
        environ = os.environ | {WORKER_ENV: msgspec.json.encode(own).decode(), METRICS_ENV: metrics}
        command = [sys.executable, "-m", "kvbus.router.running"]
        count = min(settings.workers, WORKERS_MAX)
        workers = [
            await asyncio.create_subprocess_exec(*command, env=environ, stdin=asyncio.subprocess.PIPE)
            for _ in range(count)
        ]
        ends = [asyncio.create_task(worker.wait()) for worker in workers]
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait([stop, *ends], return_when=asyncio.FIRST_COMPLETED)
        died = not stopping.is_set()
        await _stop(workers, ends, settings.drain_s + STOP_EXTRA_S)
        stop.cancel()
    if died:
        raise CommandFailed("a worker of the router has ended by itself: its log says why")


async def _stop(workers: list[asyncio.subprocess.Process], ends: list["asyncio.Task[int]"], timeout_s: float) -> None:
    for worker in workers:
        if worker.returncode is None:
            worker.terminate()
    _, late = await asyncio.wait(ends, timeout=timeout_s)
    for worker in workers:
        if late and worker.returncode is None:
            worker.kill()
    await asyncio.wait(ends)


def worker() -> None:
    """A worker's main function."""
    settings = msgspec.json.decode(os.environ[WORKER_ENV], type=RouterSettings)
    process.configure_logging()
    process.run(lambda stopping: _serve_beside(settings, stopping))


async def _serve_beside(settings: RouterSettings, stopping: asyncio.Event) -> None:
    """Serve until told to stop, or until standard input ends: then the supervisor is gone, however it went."""
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.set)
    await serve(settings, stopping, shared_port=True)


if __name__ == "__main__":
    worker()
