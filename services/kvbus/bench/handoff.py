"""`kvbus bench handoff`: handing a prompt's KV from prefill to decode, stock and ours, on real vLLM engines.

Five pairs of engines run on this machine, all stopped (SIGSTOP) but the one in turn. At every point (prompt length,
requests at a time) the arms take turns in random order, once a round. The client talks to the engines directly and is
the same for every arm, so that handing over is compared, not a router. Times between processes come from probes in
the engines; see `probe`.
"""

import asyncio
import datetime
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvbus.bench.handoff_arms import ARMS, QUICK_ARMS, ArmProcesses, guarded, start_arms
from kvbus.bench.handoff_points import Point, Turn, measure, measure_idle
from kvbus.bench.handoff_text import text_of
from kvbus.bench.report import Arm, Report, deliver, metric, say
from kvbus.engine.launch import platform_problem
from kvbus.engine.model import make_model
from kvbus.errors import ConfigError

Say = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    arms: list[str]
    points: list[Point]
    rounds: int
    idle_s: float


FULL_POINTS = [
    Point(length=600, concurrency=1, requests=6),
    Point(length=1800, concurrency=1, requests=3),
    Point(length=600, concurrency=8, requests=16),
    Point(length=1800, concurrency=8, requests=8),
]
QUICK_POINTS = [Point(length=600, concurrency=1, requests=4), Point(length=600, concurrency=8, requests=8)]
FULL = Plan(arms=[arm.name for arm in ARMS], points=FULL_POINTS, rounds=3, idle_s=4.0)
QUICK = Plan(arms=list(QUICK_ARMS), points=QUICK_POINTS, rounds=1, idle_s=2.0)


class Gathered:
    """Samples of every arm, by metric and round, and the answers that differ."""

    def __init__(self, arms: list[str]) -> None:
        self.rounds: dict[str, dict[str, list[list[float]]]] = {arm: {} for arm in arms}
        self.differing = 0
        self._tokens: dict[tuple[str, int], list[list[int]]] = {}

    def add(self, arm: str, samples: dict[str, list[float]], suffix: str = "") -> None:
        for name, values in samples.items():
            self.rounds[arm].setdefault(name + suffix, []).append(values)

    def compare(self, point: Point, number: int, turn: Turn) -> None:
        """Greedy answers to the same prompts must be the same tokens in every arm."""
        tokens = [answer.tokens for answer in turn.answers]
        first = self._tokens.setdefault((point.key, number), tokens)
        self.differing += sum(a != b for a, b in zip(first, tokens, strict=True))

    def arms(self) -> list[Arm]:
        return [
            Arm(name, {key: metric(values) for key, values in found.items()}) for name, found in self.rounds.items()
        ]


async def run(plan: Plan, work_dir: Path, say: Say) -> Report:
    """Start the arms, measure, stop them. Raises CommandFailed."""
    model = make_model("small", work_dir / "model")
    specs = [arm for arm in ARMS if arm.name in plan.arms]
    with guarded() as guard:
        since_s = time.monotonic()
        arms = await start_arms(specs, model, work_dir, guard, say)
        say(f"{2 * len(arms)} engines are up after {time.monotonic() - since_s:.0f} s; measuring")
        since_s = time.monotonic()
        try:
            gathered = await _rounds(plan, arms, say)
        finally:
            await asyncio.gather(*(arm.stop() for arm in arms))
        say(f"measured in {time.monotonic() - since_s:.0f} s")
    return Report(bench="handoff", arms=gathered.arms(), conditions=_conditions(plan, gathered))


async def _rounds(plan: Plan, arms: list[ArmProcesses], say: Say) -> Gathered:
    gathered, order = Gathered([arm.spec.name for arm in arms]), random.Random(17)  # noqa: S311  (an order of turns)
    for number in range(plan.rounds):
        for point in plan.points:
            for arm in order.sample(arms, len(arms)):
                turn = await measure(arm, point, number)
                gathered.add(arm.spec.name, turn.samples, f"_{point.key}")
                gathered.compare(point, number, turn)
                say(f"round {number + 1} of {plan.rounds}, {point.key}, {arm.spec.name}: {_short(turn)}")
    for arm in arms:
        gathered.add(arm.spec.name, await measure_idle(arm, plan.idle_s))
    return gathered


def _short(turn: Turn) -> str:
    parts = {name: metric([turn.samples[name]]).p50 for name in ("finish_to_start_ms", "ttft_ms")}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())


def _conditions(plan: Plan, gathered: Gathered) -> dict[str, object]:
    points = ", ".join(f"{point.requests} of {point.length} tokens at {point.concurrency}" for point in plan.points)
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "what": f"8-layer model, 32 KB of KV a token, chunks of 256 tokens; {plan.rounds} rounds of {points}",
        "load_average": load,
        "points": [point.key for point in plan.points],
        "rounds": plan.rounds,
        "differing_answers": gathered.differing,
    }


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603
    except (subprocess.SubprocessError, OSError):
        return "unknown"


def _plan(quick: bool, rounds: int | None, arms: str) -> Plan:
    plan = QUICK if quick else FULL
    if rounds is not None:
        plan = msgspec.structs.replace(plan, rounds=rounds)
    if arms:
        names = arms.split(",")
        unknown = set(names) - {arm.name for arm in ARMS}
        if unknown:
            raise ConfigError(f"no such arm: {', '.join(sorted(unknown))}; there are {', '.join(a.name for a in ARMS)}")
        plan = msgspec.structs.replace(plan, arms=names)
    return plan


def register_bench(bench_app: typer.Typer) -> None:
    """Add `handoff` to the group `kvbus bench`."""

    @bench_app.command(name="handoff")
    def handoff(
        quick: Annotated[bool, typer.Option(help="two arms, one length, under a minute once engines are up")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
        rounds: Annotated[int | None, typer.Option(min=1, help="turns of every arm at every point")] = None,
        arms: Annotated[str, typer.Option(help="only these arms, with commas")] = "",
        out: Annotated[Path | None, typer.Option(help="also write the report to this file")] = None,
        work_dir: Annotated[Path | None, typer.Option(help="keep logs, probes and the model here")] = None,
    ) -> None:
        """Hand-over from prefill to decode: stock pull, stock push and kvbus, on real vLLM engines in turn."""
        problem = platform_problem()
        if problem:
            raise ConfigError(problem)
        plan = _plan(quick, rounds, arms)
        with tempfile.TemporaryDirectory(prefix="kvbus-handoff-") as temporary:
            report = asyncio.run(run(plan, work_dir or Path(temporary), say))
        deliver(report, text_of, as_json=as_json, out=out)
