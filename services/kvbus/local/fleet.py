"""`kvbus up`: nats-server, matcher, reuse, router and engines as child processes of this one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from kvbus.auth.local import local_access
from kvbus.bus import Bus
from kvbus.embedded import EmbeddedNats
from kvbus.engine.launch import platform_problem
from kvbus.engine.model import SHAPES, make_model
from kvbus.errors import BusError, ConfigError
from kvbus.local.children import Child, kvbus_command
from kvbus.local.options import EngineProcess, FleetOptions
from kvbus.local.ports import free_port
from kvbus_schemas import EngineCard, Role, decode, subjects

__all__ = ["EngineProcess", "Fleet", "FleetOptions", "start_fleet"]

READY_MAX_S = 300.0
"""How long all of it may take to be ready. A busy two-core machine needs 60 s for two engines."""
LOOK_EVERY_S = 0.1
CARDS_TRIES = 6
"""Each takes some seconds when NATS does not answer."""

TEST_MODEL_ARGUMENTS = [
    *("--dtype", "float32"),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "512"),
    *("--block-size", "32"),
    *("--num-gpu-blocks-override", "512"),
    "--enforce-eager",
    "--disable-uvicorn-access-log",
    "--enable-prompt-tokens-details",
]
"""What fits the seeded models on a CPU."""

Say = Callable[[str], None]


class Fleet:
    """A running fleet. Made by `start_fleet`."""

    def __init__(self, options: FleetOptions, say: Say) -> None:
        self.options, self.say = options, say
        self.nats: EmbeddedNats | None = None
        self.nats_url = options.nats
        self.engines: list[EngineProcess] = []
        self.matchers: list[Child] = []
        self.reuses: list[Child] = []
        self.routers: list[Child] = []
        self.observers: list[Child] = []
        self.router_ports: list[int] = []
        self.console_url = ""
        self.metrics_urls: dict[str, str] = {}
        """By process: where Prometheus may ask. Filled with `metrics`."""
        self.plain_url = ""
        self.model = options.model
        self.log_dir = options.work_dir / "logs"
        self.bus: Bus | None = None
        counts = {role: getattr(options, role) for role in ("prefill", "decode", "routers", "matchers", "reuse")}
        self.access = local_access(options.work_dir, secure=options.secure, nats=options.nats, **counts)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.router_ports[0]}"

    def ready_line(self) -> str:
        """The one line of `kvbus up --json`."""
        engines = [
            {"engine_id": e.engine_id, "role": e.role, "url": e.url, "pid": e.child.pid}
            for e in self.engines
            if e.role != "plain"
        ]
        line: dict[str, object] = {"base_url": self.base_url, "nats_url": self.nats_url, "engines": engines}
        if self.options.metrics:
            line["metrics"] = self.metrics_urls
        if self.options.console:
            line["console_url"] = self.console_url
        return msgspec.json.encode(line).decode()

    def children(self) -> list[Child]:
        """Everything that runs, in the order of its start."""
        return [*self.matchers, *self.reuses, *(e.child for e in self.engines), *self.routers, *self.observers]

    async def start(self) -> None:
        """Start all, in order; return when the router has an engine of each role. Raises on the first failure."""
        self._prepare_model()
        if not self.nats_url:
            self.say("starting nats-server with JetStream")
            self.nats = EmbeddedNats(store_dir=self.options.work_dir / "nats", config_file=self.access.conf)
            self.nats_url = await asyncio.to_thread(lambda: self.nats.start().url if self.nats else "")
        self.bus = await self.access.join(self.nats_url)
        for number in range(self.options.matchers):
            self.start_matcher(number)
        for number in range(self.options.reuse):
            self.start_reuse(number)
        roles: list[tuple[Role, int]] = [("prefill", self.options.prefill), ("decode", self.options.decode)]
        for role, count in roles:
            for number in range(count):
                self.start_engine(role, number)
        if self.options.plain:
            self._start_plain()
        for number in range(self.options.routers):
            self.start_router(number)
        if self.options.metrics:
            self._start_observer()
        if self.options.console:
            self._start_console()
        await self._until_ready()

    def start_matcher(self, number: int) -> Child:
        name = f"matcher-{number}"
        child = self._child(name, "matcher", "--nats", self.nats_url, *self._metrics_arguments(name))
        self.matchers.append(child)
        return child

    def start_reuse(self, number: int) -> Child:
        name = f"reuse-{number}"
        child = self._child(name, "reuse", "--nats", self.nats_url, *self._metrics_arguments(name))
        self.reuses.append(child)
        return child

    def start_router(self, number: int) -> Child:
        port = self.options.port if number == 0 and self.options.port else free_port()
        self.router_ports.append(port)
        command = ["router", "--nats", self.nats_url, "--port", str(port), *self.options.router_arguments]
        child = self._child(f"router-{number}", *command)
        self.metrics_urls[f"router-{number}"] = f"http://127.0.0.1:{port}/metrics"
        self.routers.append(child)
        return child

    def start_engine(self, role: Role, number: int) -> EngineProcess:
        engine_id, port = f"{role}-{number}", free_port()
        self.say(f"starting {engine_id} ({'vllm serve' if self.options.engine == 'vllm' else 'sim'}, port {port})")
        own = self.options.prefill_arguments if role == "prefill" else self.options.decode_arguments
        command = ["engine", role, self.model, "--nats", self.nats_url, "--engine-id", engine_id, "--port", str(port)]
        if self.options.engine == "sim":
            command = ["sim-engine", *command[1:], *self.options.engine_arguments, *own]
        else:
            command += self._vllm_arguments() + own
        engine = EngineProcess(
            engine_id=engine_id, role=role, url=f"http://127.0.0.1:{port}", child=self._child(engine_id, *command)
        )
        self.engines.append(engine)
        self.metrics_urls[engine_id] = f"{engine.url}/metrics"
        return engine

    def _start_observer(self) -> None:
        name = "observer"
        self.observers.append(self._child(name, name, "--nats", self.nats_url, *self._metrics_arguments(name)))

    def _start_console(self) -> None:
        port = str(self.options.console_port or free_port())
        self.console_url = f"http://127.0.0.1:{port}"
        self.metrics_urls["console"] = f"{self.console_url}/metrics"
        command = ["console", "--nats", self.nats_url, "--port", port]
        self.observers.append(self._child("console", *command, access="observer"))

    def _metrics_arguments(self, name: str) -> list[str]:
        """For a process that has no page unless it is told to."""
        if not self.options.metrics:
            return []
        port = free_port()
        self.metrics_urls[name] = f"http://127.0.0.1:{port}/metrics"
        return ["--metrics-port", str(port)]

    def engine(self, engine_id: str) -> EngineProcess:
        return next(engine for engine in self.engines if engine.engine_id == engine_id)

    async def restart_engine(self, engine_id: str) -> EngineProcess:
        """Start a new process in the place of one that has ended."""
        old = self.engine(engine_id)
        self.engines.remove(old)
        role, number = engine_id.rsplit("-", 1)
        assert role in ("prefill", "decode")
        return self.start_engine("prefill" if role == "prefill" else "decode", int(number))

    async def stop(self) -> None:
        """Routers finish their streams first, then engines, reuse processes, matchers and the server."""
        if self.bus is not None:
            await self.bus.close()
        for children in (self.observers, self.routers, [e.child for e in self.engines], self.reuses, self.matchers):
            await asyncio.gather(*(child.stop() for child in children))
        if self.nats is not None:
            await asyncio.to_thread(self.nats.stop)

    async def cards(self) -> dict[str, EngineCard]:
        """The engines that have announced themselves. A NATS that is short of CPU, as while engines load, is asked
        again."""
        for _ in range(CARDS_TRIES - 1):
            with contextlib.suppress(BusError):
                return await self._cards()
        return await self._cards()

    async def _cards(self) -> dict[str, EngineCard]:
        assert self.bus is not None
        bucket = await self.bus.bucket(subjects.ENGINES_BUCKET)
        entries = {key: await bucket.get(key) for key in await bucket.keys(">")}
        decoded = {key: decode(entry.value) for key, entry in entries.items() if entry is not None}
        return {key: card for key, card in decoded.items() if isinstance(card, EngineCard)}

    async def wait_engines(self, ready_max_s: float = READY_MAX_S) -> None:
        """Return when every engine answers and has announced itself. Raises when one ends or time is over."""
        deadline_s = time.monotonic() + ready_max_s
        waiting = {engine.engine_id: engine for engine in self.engines}
        async with aiohttp.ClientSession() as http:
            while waiting:
                cards = await self.cards()
                for engine in list(waiting.values()):
                    engine.child.check()
                    announced = engine.role == "plain" or engine.engine_id in cards
                    if announced and await _healthy(http, engine.url):
                        self.say(f"{engine.engine_id} is ready")
                        del waiting[engine.engine_id]
                _check_time(deadline_s, ready_max_s, sorted(waiting), self.log_dir)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _until_ready(self) -> None:
        await self.wait_engines()
        deadline_s = time.monotonic() + READY_MAX_S
        routers = zip(self.routers, self.router_ports, strict=True)
        awaited = [(f"http://127.0.0.1:{port}", [child, *self.matchers, *self.reuses]) for child, port in routers]
        if self.console_url:
            awaited.append((self.console_url, [self.observers[-1]]))
        async with aiohttp.ClientSession() as http:
            for url, children in awaited:
                while not await _healthy(http, url):
                    for child in children:
                        child.check()
                    _check_time(deadline_s, READY_MAX_S, [children[0].name], self.log_dir)
                    await asyncio.sleep(LOOK_EVERY_S)
        self.say(f"ready: {self.base_url}")

    def _prepare_model(self) -> None:
        if self.options.engine == "sim":
            return
        problem = platform_problem()
        if problem:
            raise ConfigError(problem)
        if self.model in SHAPES:
            self.say(f"preparing the seeded model {self.model!r}")
            name: Literal["tiny", "small"] = "tiny" if self.model == "tiny" else "small"
            self.model = str(make_model(name, self.options.work_dir / "models" / self.model))

    def _vllm_arguments(self) -> list[str]:
        if self.options.model not in SHAPES:
            return list(self.options.engine_arguments)
        named = ["--served-model-name", self.options.model]
        return named + TEST_MODEL_ARGUMENTS + self.options.engine_arguments

    def _start_plain(self) -> None:
        port = free_port()
        self.plain_url = f"http://127.0.0.1:{port}"
        self.say(f"starting one engine without a bus to compare with (port {port})")
        child = self._plain_light(port) if self.options.engine == "sim" else self._plain_vllm(port)
        self.engines.append(EngineProcess(engine_id="plain", role="plain", url=self.plain_url, child=child))

    def _plain_vllm(self, port: int) -> Child:
        from kvbus.engine.launch import plain_command, plain_environment

        command = plain_command(self.model, port) + self._vllm_arguments()
        return Child("plain", command, self.log_dir, plain_environment())

    def _plain_light(self, port: int) -> Child:
        command = ["sim-engine", "decode", self.model, "--nats", "", "--port", str(port)]
        return self._child("plain", *command, *self.options.engine_arguments)

    def _child(self, name: str, *arguments: str, access: str = "") -> Child:
        environ = self.access.environ(access or name)
        environ |= self.options.environ
        environ |= {f"KVBUS_ENGINE_{key.upper()}": value for key, value in self.options.engine_settings.items()}
        return Child(name, kvbus_command(*arguments), self.log_dir, environ)


@contextlib.asynccontextmanager
async def start_fleet(options: FleetOptions, say: Say = lambda _: None) -> AsyncIterator[Fleet]:
    """A fleet that is ready inside the `async with`, and gone after it, whatever happens."""
    fleet = Fleet(options, say)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.stop()


async def _healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url + "/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError):
        return False


def _check_time(deadline_s: float, max_s: float, waiting: list[str], log_dir: Path) -> None:
    if waiting and time.monotonic() > deadline_s:
        raise ConfigError(f"{', '.join(waiting)} not ready after {max_s:.0f} s: see the logs in {log_dir}")
