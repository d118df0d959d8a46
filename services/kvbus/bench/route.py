"""`kvbus bench route`: what it costs to let a router on the bus decide, beside a policy in the router.

Real routers, a real nats-server, engines that answer at once, and the examples of `schemas/examples` as they are, each
in a process of its own. The arms take turns within each round. `choice_ms` is what the router itself measured from the
question to the decision (RouteDecided), `latency_ms` what the client saw; `added_` is an arm's median, or 99th
percentile, less that of the policy in the same round. `asked directly` is the example's answer to a bare question,
without a router: the bus and the guest alone. What a policy costs by itself is `kvbus bench policies`.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import kvbus_schemas
from kvbus.bench import http_load, report
from kvbus.bench.router import PATH, SIZES, Running, World, kvbus_command
from kvbus.bus import Bus, BusSettings
from kvbus.errors import CommandFailed
from kvbus.process import new_incarnation
from kvbus.router.settings import RouterSettings
from kvbus_schemas import AnyMessage, EngineView, RouteAnswered, RouteAsked, RouteDecided, subjects

POLICY = "policy in the router"
DIRECT = "guest in Python, asked directly"
PYTHON_GUEST, JAVASCRIPT_GUEST = "bench-python", "bench-javascript"
NPM_PACKAGES = ("@nats-io/transport-node@3", "@msgpack/msgpack@3")
NPM_TIMEOUT_S = 120.0
DEADLINE_MS = 1000.0
"""Of the guests here, so that a slow answer is measured and not replaced."""
DIRECT_TIMEOUT_S = 10.0
USUAL_DEADLINE_MS = RouterSettings().guest_deadline_ms
ADDED_MAX_MS = 1.0
"""What a guest may add at the median (issue 5, sentence 6)."""
CONCURRENCIES = (1, 16)
P99 = 0.99


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure."""

    requests: int
    """Per arm, concurrency and round."""
    rounds: int


FULL = Plan(requests=600, rounds=7)
QUICK = Plan(requests=150, rounds=3)


class Choices:
    """How long each router took to choose, in milliseconds, by who decided."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def hear(self, message: AnyMessage) -> None:
        """Take one decision."""
        if isinstance(message, RouteDecided):
            self._taken.setdefault(message.policy, []).append(message.decided_us / 1000.0)

    def take(self) -> dict[str, list[float]]:
        """All since the last time."""
        taken, self._taken = self._taken, {}
        return taken


def example(name: str) -> Path:
    """A file of schemas/examples, which are in a checkout and not in the wheel. Raises CommandFailed."""
    path = Path(kvbus_schemas.__file__).parent.parent / "examples" / name
    if not path.exists():
        raise CommandFailed(f"{path.name} is not there: run this in a checkout of kvbus")
    return path


def npm_directory() -> Path:
    """Where the packages of the JavaScript example are, installed from npm on first use. Raises CommandFailed."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise CommandFailed("node and npm are not installed")
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbus" / "npm-router"
    if not (directory / "node_modules" / "@msgpack").exists():
        directory.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--no-save", *NPM_PACKAGES]
        try:
            subprocess.run(command, cwd=directory, check=True, timeout=NPM_TIMEOUT_S, capture_output=True)  # noqa: S603
        except (subprocess.SubprocessError, OSError) as error:
            raise CommandFailed(f"npm install did not work here: {error}") from error
    shutil.copy(example("router.mjs"), directory)
    return directory


def arms_of(world: World, stack: contextlib.ExitStack) -> dict[str, Running]:
    """The routers by who decides: the policy, and a guest in each language that there is."""
    kvbus = kvbus_command(world.nats.url, 1)
    arms = {POLICY: world.start(POLICY, kvbus)}
    python = [sys.executable, str(example("router.py"))]
    _guest(stack, [*python, PYTHON_GUEST, world.nats.url])
    found = {PYTHON_GUEST: world.start(PYTHON_GUEST, _asking(kvbus, PYTHON_GUEST))}
    try:
        script = npm_directory() / "router.mjs"
    except CommandFailed as error:
        world.notes["guest in JavaScript"] = str(error)
    else:
        _guest(stack, ["node", str(script), JAVASCRIPT_GUEST, world.nats.url])
        found[JAVASCRIPT_GUEST] = world.start(JAVASCRIPT_GUEST, _asking(kvbus, JAVASCRIPT_GUEST))
    return arms | found


def _asking(kvbus: Sequence[str], guest: str) -> list[str]:
    return [*kvbus, "--guest", guest, "--guest-deadline-ms", str(DEADLINE_MS)]


def _guest(stack: contextlib.ExitStack, command: Sequence[str]) -> None:
    """Start an example; return when it says that it answers. Raises CommandFailed."""
    process = subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True)  # noqa: S603
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    if "answers" not in process.stdout.readline():
        raise CommandFailed(f"{Path(command[1]).name} has ended by itself")


Samples = dict[str, dict[str, list[list[float]]]]


async def measure(world: World, arms: dict[str, Running], plan: Plan) -> report.Report:
    """All arms and concurrencies in turn, `rounds` times."""
    samples: Samples = {name: {} for name in arms}
    choices = Choices()
    direct: list[list[float]] = []
    bus = await Bus.connect(BusSettings(nats=world.nats.url), name="bench", incarnation=new_incarnation())
    try:
        await bus.subscribe(subjects.of_kind(RouteDecided), choices.hear)
        for _ in range(plan.rounds):
            direct.append(await _asked_directly(bus, plan.requests))
            for concurrency in CONCURRENCIES:
                for name, arm in arms.items():
                    latencies_ms = await _latencies_ms(arm.url, concurrency, plan.requests)
                    await bus.barrier()
                    _keep(samples, name, concurrency, latencies_ms, choices.take())
    finally:
        await bus.close()
    found = [report.Arm(_label(name), _metrics(samples, name)) for name in arms]
    found.append(report.Arm(DIRECT, {"choice_ms_c1": report.metric(direct)}))
    missing = [report.Arm(name, {}, note) for name, note in world.notes.items()]
    conditions = msgspec.to_builtins(plan) | {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    return report.Report(bench="route", arms=found + missing, conditions=conditions)


async def _asked_directly(bus: Bus, requests: int) -> list[float]:
    """One question after the other, straight to the example; milliseconds from question to answer."""
    answered = asyncio.Event()
    views = [EngineView(engine_id="p", role="prefill"), EngineView(engine_id="d", role="decode")]
    subscription = await bus.subscribe(subjects.of_kind(RouteAnswered, to=bus.name), lambda _answer: answered.set())
    taken = []
    for number in range(requests):
        asked = RouteAsked(
            ask_id=f"{number}", request_id="r", model="m", prompt_bytes=1, engines=views, deadline_ms=DEADLINE_MS
        )
        answered.clear()
        started_s = time.perf_counter()
        await bus.publish(asked, PYTHON_GUEST)
        await asyncio.wait_for(answered.wait(), DIRECT_TIMEOUT_S)
        taken.append((time.perf_counter() - started_s) * 1e3)
    await subscription.stop()
    return taken


async def _latencies_ms(url: str, concurrency: int, requests: int) -> list[float]:
    body = b'{"model": "trivial", "max_tokens": 1, "prompt": "%b"}' % (b"x" * SIZES["2KiB"])
    request = http_load.request_bytes(PATH, body)
    return [one * 1e3 for one in await http_load.drive(url, request, concurrency=concurrency, requests=requests)]


def _keep(
    samples: Samples, name: str, concurrency: int, latencies_ms: list[float], choices: dict[str, list[float]]
) -> None:
    """One turn of an arm. Of a guest's arm only what the guest has decided counts as its choice."""
    mine = [taken for policy, taken in choices.items() if name == POLICY or policy == f"guest {name}"]
    kept = samples[name]
    kept.setdefault(f"latency_ms_c{concurrency}", []).append(latencies_ms)
    kept.setdefault(f"choice_ms_c{concurrency}", []).append([one for taken in mine for one in taken])


def _label(name: str) -> str:
    return {PYTHON_GUEST: "guest in Python", JAVASCRIPT_GUEST: "guest in JavaScript"}.get(name, name)


def _metrics(samples: Samples, name: str) -> dict[str, report.Metric]:
    found = {what: report.metric(rounds) for what, rounds in samples[name].items()}
    if name == POLICY:
        return found
    for what, rounds in samples[name].items():
        pairs = [(mine, base) for mine, base in zip(rounds, samples[POLICY][what], strict=True) if mine and base]
        medians = [[statistics.median(mine) - statistics.median(base)] for mine, base in pairs]
        worst = [[report.percentile(mine, P99) - report.percentile(base, P99)] for mine, base in pairs]
        found[f"added_{what}"] = report.metric(medians)
        found[f"added_p99_{what}"] = report.metric(worst)
        if what.startswith("choice"):
            late = [[100.0 * sum(one > USUAL_DEADLINE_MS for one in mine) / len(mine)] for mine, _ in pairs]
            found[f"late_percent_c{what.rpartition('c')[2]}"] = report.metric(late)
    return found


def run(*, quick: bool = False) -> report.Report:
    """The whole benchmark. Raises CommandFailed when not even the engines start."""
    import uvloop

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing that was started is left running
    with contextlib.ExitStack() as stack:
        world = World(stack)
        return uvloop.run(measure(world, arms_of(world, stack), QUICK if quick else FULL))


def verdict(outcome: report.Report) -> str:
    """Whether the guest in Python adds less than it may."""
    added = next(arm for arm in outcome.arms if arm.name == "guest in Python").metrics["added_choice_ms_c1"].p50
    met = "met" if added < ADDED_MAX_MS else "NOT met"
    return f"a guest in Python adds {added:g} ms to a choice at the median, {ADDED_MAX_MS:g} ms at most: {met}"


def register_bench(bench_app: typer.Typer) -> None:
    """Add `route` to the group `kvbus bench`."""

    @bench_app.command(name="route")
    def route(
        quick: Annotated[bool, typer.Option(help="under a minute")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """What a router on the bus adds to a choice and to a request, beside the policy in the router."""
        outcome = run(quick=quick)
        if as_json:
            typer.echo(outcome.json())
            return
        for at in CONCURRENCIES:
            outcome.show([f"{what}_c{at}" for what in ("choice_ms", "added_choice_ms", "added_p99_choice_ms")])
            outcome.show([f"{what}_c{at}" for what in ("latency_ms", "added_latency_ms", "late_percent")])
        typer.echo(verdict(outcome))
