"""`kvbus bench router`: what a router adds to a request, and what it costs, against engines that answer at once.

Arms of one engine: kvbus in mode local, with its messages on a real NATS and (like the others) without any, and the
Rust routers vllm-router and sglang-router from PyPI. Arms that send a prefill and a decode leg: kvbus in mode early,
vllm-router with --vllm-pd-disaggregation, sglang-router with --pd-disaggregation, and the logic of vLLM's example
proxy. All take turns within a round; added latency is the mean (or median) less that of asking the engine directly
right before.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvbus.bench import http_load, report
from kvbus.embedded import EmbeddedNats
from kvbus.errors import CommandFailed
from kvbus.local.ports import free_port

PATH = "/v1/completions"
SIZES = {"200B": 200, "2KiB": 2048, "16KiB": 16 * 1024}
CONCURRENCIES = (1, 64)
RUST = ("vllm-router", "sglang-router")
INSTALL_TIMEOUT_S = 300.0
PYTHON = sys.executable
_COMMAND = "import typer; from kvbus.cli.router import register; app = typer.Typer(); register(app); app()"
"""`kvbus router` alone: no other command's imports in what is measured."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure."""

    requests: int
    """Per arm, size, concurrency and round."""
    rounds: int
    workers: int


FULL = Plan(requests=1500, rounds=5, workers=2)
QUICK = Plan(requests=250, rounds=2, workers=2)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the measurement."""

    key: str
    size: int
    concurrency: int
    requests: int


class Running(msgspec.Struct):
    """An arm that is up."""

    name: str
    url: str
    pid: int
    headers: list[str] = []


class World:
    """Engines, NATS and routers, started one after the other and stopped together."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-bench-")))
        self.nats = stack.enter_context(EmbeddedNats())
        self.notes: dict[str, str] = {}
        self.prefill = self.engine("prefill").url
        self.decode = self.engine("decode").url

    def engine(self, role: str) -> Running:
        """A trivial engine on the bus."""
        command = ["-m", "kvbus.bench.trivial_engine", "--nats", self.nats.url, "--role", role, "--engine-id", role]
        return self.start(role, [PYTHON, *command, "--port", "{port}"])

    def start(self, name: str, command: Sequence[str], headers: Sequence[str] = ()) -> Running:
        """An arm; `{port}` in its command becomes a free port. Raises CommandFailed."""
        port = free_port()
        log = self._directory / f"{len(list(self._directory.iterdir()))}.log"
        environ = {"KVBUS_LOG_LEVEL": "info", "PYTHONUNBUFFERED": "1"}
        one = self._stack.enter_context(
            http_load.started([part.replace("{port}", str(port)) for part in command], log, environ)
        )
        url = f"http://127.0.0.1:{port}"
        http_load.wait_ready(url, _request(SIZES["200B"], headers), one, log)
        return Running(name=name, url=url, pid=one.pid, headers=list(headers))

    def try_start(self, name: str, command: Sequence[str], headers: Sequence[str] = ()) -> list[Running]:
        """The arm, or none and a note that says why."""
        try:
            return [self.start(name, command, headers)]
        except (CommandFailed, OSError) as error:
            self.notes[name] = str(error)
            return []


def rust_bin(name: str) -> Path | None:
    """The command of a Rust router, installed from PyPI on first use into a cache of its own; None if that fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbus" / name
    command = cache / "bin" / name
    if command.exists():
        return command
    for step in ([PYTHON, "-m", "venv", str(cache)], [str(cache / "bin" / "pip"), "install", "-q", name]):
        try:
            subprocess.run(step, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)  # noqa: S603
        except (subprocess.SubprocessError, OSError):
            return None
    return command if command.exists() else None


def kvbus_command(nats: str, workers: int) -> list[str]:
    """A router of ours."""
    return [PYTHON, "-c", _COMMAND, "--nats", nats, "--port", "{port}", "--workers", str(workers)]


def arms_of(world: World, workers: int) -> list[Running]:
    """Every arm that can be started here."""
    kvbus = kvbus_command(world.nats.url, 1)
    static = f"prefill={world.prefill},decode={world.decode}"
    nowhere = f"nats://127.0.0.1:{free_port()}"
    alone = [*kvbus_command(nowhere, 1), "--static", static]
    arms = world.try_start("kvbus local, no NATS", alone, ["x-kvbus-mode: local"])
    arms += world.try_start("kvbus local", kvbus, ["x-kvbus-mode: local"])
    arms += world.try_start("kvbus early", kvbus)
    if workers > 1:
        arms += world.try_start(f"kvbus early x{workers}", kvbus_command(world.nats.url, workers))
    proxy = [PYTHON, "-m", "kvbus.bench.example_proxy", "--port", "{port}"]
    arms += world.try_start("example proxy", [*proxy, "--prefill", world.prefill, "--decode", world.decode])
    for name in RUST:
        command = rust_bin(name)
        if command is None:
            world.notes[name] = f"pip install {name} did not work here"
            continue
        arms += _rust_arms(world, name, str(command))
    return arms


def _rust_arms(world: World, name: str, command: str) -> list[Running]:
    common = ["--port", "{port}", "--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "error"]
    own_metrics = ["--prometheus-port", str(free_port())]
    start = [command] if name == "vllm-router" else [command, "launch"]
    split = "--vllm-pd-disaggregation" if name == "vllm-router" else "--pd-disaggregation"
    found = world.try_start(name, [*start, "--worker-urls", world.decode, *common, *own_metrics])
    own_metrics = ["--prometheus-port", str(free_port())]
    legs = [split, "--prefill", world.prefill, "--decode", world.decode]
    return found + world.try_start(f"{name} p/d", [*start, *legs, *common, *own_metrics])


def _request(size: int, headers: Sequence[str] = ()) -> bytes:
    frame = b'{"model": "trivial", "max_tokens": 1, "prompt": "%b"}'
    return http_load.request_bytes(PATH, frame % (b"x" * (size - len(frame) + 2)), headers)


Samples = dict[str, list[list[float]]]


async def measure(world: World, arms: Sequence[Running], plan: Plan) -> report.Report:
    """All arms, sizes and concurrencies in turn, `rounds` times; the direct way right before each."""
    samples: dict[str, Samples] = {name: {} for name in ("direct", *(arm.name for arm in arms))}
    loads = [
        Load(key=f"{label}_c{concurrency}", size=size, concurrency=concurrency, requests=plan.requests)
        for label, size in SIZES.items()
        for concurrency in CONCURRENCIES
    ]
    for _ in range(plan.rounds):
        for load in loads:
            for arm in arms:
                await _one(world.decode, arm, load, samples)
    found = [
        report.Arm(name, {metric: report.metric(rounds) for metric, rounds in metrics.items()})
        for name, metrics in samples.items()
    ]
    missing = [report.Arm(name, {}, note) for name, note in world.notes.items()]
    return report.Report(
        bench="router", arms=found + missing, conditions=msgspec.to_builtins(plan) | {"cpus": os.cpu_count()}
    )


async def _one(direct: str, arm: Running, load: Load, samples: dict[str, Samples]) -> None:
    base_us = await _latencies_us(direct, load, ())
    before_s = http_load.cpu_seconds(arm.pid)
    taken_us = await _latencies_us(arm.url, load, arm.headers)
    cpu_ms = (http_load.cpu_seconds(arm.pid) - before_s) * 1e6 / load.requests
    _keep(samples["direct"], f"mean_us_{load.key}", statistics.fmean(base_us))
    found = samples[arm.name]
    _keep(found, f"added_us_{load.key}", statistics.fmean(taken_us) - statistics.fmean(base_us))
    _keep(found, f"added_median_us_{load.key}", statistics.median(taken_us) - statistics.median(base_us))
    _keep(found, f"cpu_ms_per_1000_{load.key}", cpu_ms)


def _keep(found: Samples, name: str, value: float) -> None:
    found.setdefault(name, []).append([value])


async def _latencies_us(url: str, load: Load, headers: Sequence[str]) -> list[float]:
    request = _request(load.size, headers)
    latencies_s = await http_load.drive(url, request, concurrency=load.concurrency, requests=load.requests)
    return [latency_s * 1e6 for latency_s in latencies_s]


def run(*, quick: bool = False, workers: int = 2) -> report.Report:
    """The whole benchmark. Raises CommandFailed when not even the engines start."""
    import uvloop

    plan = msgspec.structs.replace(QUICK if quick else FULL, workers=workers)
    with contextlib.ExitStack() as stack:
        world = World(stack)
        arms = arms_of(world, workers)
        return uvloop.run(measure(world, arms, plan))


def register_bench(bench_app: typer.Typer) -> None:
    """Add `router` to the group `kvbus bench`."""

    @bench_app.command(name="router")
    def router(
        quick: Annotated[bool, typer.Option(help="under a minute")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
        workers: Annotated[int, typer.Option(help="processes of the arm with several")] = 2,
    ) -> None:
        """Latency that a router adds, and its CPU, beside the Rust routers and vLLM's example proxy."""
        outcome = run(quick=quick, workers=workers)
        if as_json:
            typer.echo(outcome.json())
            return
        for what in ("added_us", "added_median_us", "cpu_ms_per_1000"):
            outcome.show([f"{what}_{size}_c{at}" for at in CONCURRENCIES for size in SIZES])
