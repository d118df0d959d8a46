"""`kvbus bench traffic`: your own traffic's shape in every mode, so that the choice of a mode follows a measurement.

The shape is turn spacing, prompt overlap, lengths and load. Every mode sees the same conversations, one mode after the
other, in a new order in every round; each round of a mode has a cache salt of its own. With `--url` the router, and so
the engines, are yours; without it a fleet is started here.
"""

import asyncio
import datetime
import os
import platform
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import aiohttp
import msgspec
import typer

from kvbus import process
from kvbus.bench.report import Arm, Report, metric, say
from kvbus.bench.traffic_client import WAYS, Crowd, Turn, Way
from kvbus.bench.traffic_memory import Memory, watch_memory
from kvbus.bench.traffic_shape import Shape, conversations_of
from kvbus.errors import CommandFailed, ConfigError
from kvbus.local.fleet import FleetOptions, start_fleet

COLUMNS = (
    "ttft_ms", "later_ttft_ms", "tpot_ms", "answer_tokens_per_s", "requests_per_s", "used_blocks_percent",
    "held_blocks_percent", "hit_percent", "expired_sessions", "failed",
)  # fmt: skip
DEFAULT_WAYS = "local,early,deferred,early+reuse,router's choice"
TURN_MAX_S = 120.0
QUICK = Shape(conversations=6, turns=3, gap_s=0.5, rate_per_s=3.0, prompt_tokens=300, answer_tokens=12)


class Where(msgspec.Struct, frozen=True):
    """What is measured."""

    url: str
    nats: str
    model: str


class Round(msgspec.Struct, frozen=True):
    """One round of one way."""

    talks: list[list[Turn]]
    took_s: float
    memory: Memory


async def measure(where: Where, shape: Shape, ways: Sequence[Way], rounds: int) -> Report:
    """Every way in every round, in random order."""
    done: dict[str, list[Round]] = {way.name: [] for way in ways}
    order = random.Random(shape.seed)  # noqa: S311  (an order of turns)
    timeout = aiohttp.ClientTimeout(total=TURN_MAX_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(rounds):
            for way in order.sample(list(ways), len(ways)):
                one = await _round(where, shape, way, number, http)
                done[way.name].append(one)
                say(f"round {number + 1} of {rounds}, {way.name}: {one.took_s:.1f} s")
    return Report(bench="traffic", arms=[arm_of(way, done[way.name]) for way in ways], conditions=_facts(shape, done))


async def _round(where: Where, shape: Shape, way: Way, number: int, http: aiohttp.ClientSession) -> Round:
    async with watch_memory(where.nats) as memory:
        since_s = time.monotonic()
        talks = await Crowd(http, where.url, where.model, way, shape).talk(conversations_of(shape, number))
        took_s = time.monotonic() - since_s
    return Round(talks, took_s, memory)


def arm_of(way: Way, rounds: list[Round]) -> Arm:
    """What one way came to."""
    by_round = [[turn for talk in one.talks for turn in talk] for one in rounds]
    right = [[turn for turn in turns if not turn.failed] for turns in by_round]
    later = [[turn for turn in turns if turn.later] for turns in right]
    spans = [one.took_s for one in rounds]
    samples: dict[str, list[list[float]]] = {
        "ttft_ms": [[turn.ttft_s * 1e3 for turn in turns] for turns in right],
        "later_ttft_ms": [[turn.ttft_s * 1e3 for turn in turns] for turns in later],
        "tpot_ms": [[turn.tpot_s * 1e3 for turn in turns] for turns in right],
        "answer_tokens_per_s": [[sum(len(t.tokens) for t in turns) / s] for turns, s in zip(right, spans, strict=True)],
        "requests_per_s": [[len(turns) / s] for turns, s in zip(right, spans, strict=True)],
        "used_blocks_percent": [one.memory.used_percent for one in rounds],
        "held_blocks_percent": [one.memory.held_percent for one in rounds],
        "hit_percent": [[100.0 * sum(bool(t.reused) for t in turns) / len(turns)] for turns in later if turns],
        "expired_sessions": [[float(sum(any(t.missed == "expired" for t in k) for k in o.talks))] for o in rounds],
        "failed": [[float(sum(bool(turn.failed) for turn in turns))] for turns in by_round],
    }
    return Arm(way.name, {name: metric(values) for name, values in samples.items()}, note=_modes(right, way))


def _modes(right: list[list[Turn]], way: Way) -> str:
    if way.mode:
        return ""
    counted = Counter(turn.mode for turns in right for turn in turns)
    return ", ".join(f"{mode} {count}" for mode, count in counted.most_common())


def differing(done: dict[str, list[Round]]) -> int:
    """Turns whose tokens are not those of the first way: with greedy sampling there must be none."""
    first, *others = done.values()
    pairs = [(a, b) for other in others for one, two in zip(first, other, strict=True)
             for x, y in zip(one.talks, two.talks, strict=True) for a, b in zip(x, y, strict=False)]  # fmt: skip
    return sum(a.tokens != b.tokens for a, b in pairs if not (a.failed or b.failed))


def _facts(shape: Shape, done: dict[str, list[Round]]) -> dict[str, object]:
    turns = {name: [turn for one in rounds for talk in one.talks for turn in talk] for name, rounds in done.items()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": "/".join(f"{value:.1f}" for value in os.getloadavg()),
        "shape": msgspec.to_builtins(shape),
        "differing_answers": differing(done),
        "misses": {name: dict(Counter(t.missed for t in some if t.later and t.missed)) for name, some in turns.items()},
        "failures": sorted({turn.failed for some in turns.values() for turn in some if turn.failed})[:10],
    }


def ways_of(text: str) -> list[Way]:
    """The ways with these names. Raises ConfigError."""
    known = {way.name: way for way in WAYS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"unknown mode {', '.join(unknown) or text!r}: choose of {', '.join(known)}")
    return [known[name] for name in names]


async def _measure_ours(options: FleetOptions, shape: Shape, ways: Sequence[Way], rounds: int) -> Report:
    async with start_fleet(options, say) as fleet:
        where = Where(fleet.base_url, fleet.nats_url, options.model)
        return await measure(where, shape, ways, rounds)


def _show(report: Report) -> None:
    report.show(COLUMNS)
    facts = report.conditions
    typer.echo(f"answers that differ between modes: {facts['differing_answers']}; load average {facts['load_average']}")
    for name, misses in facts["misses"].items():
        if misses:
            typer.echo(f"later turns without reuse, {name}: {misses}")
    for failure in facts["failures"]:
        typer.echo(f"failed: {failure}")


def register_bench(bench_app: typer.Typer) -> None:
    """Add `traffic` to the group `kvbus bench`."""
    full = Shape()

    @bench_app.command(name="traffic")
    def traffic(
        url: Annotated[str, typer.Option(help="a router that runs; else a fleet is started")] = "",
        nats: Annotated[str, typer.Option(help="with --url: its NATS, for the memory figures")] = "",
        model: Annotated[
            str, typer.Option(help="the model's name, or of the fleet: tiny, small, a directory")
        ] = "small",
        engine: Annotated[Literal["vllm", "sim"], typer.Option(help="engines of the fleet")] = "vllm",
        prefill: Annotated[int, typer.Option(min=1)] = 1,
        decode: Annotated[int, typer.Option(min=1)] = 1,
        modes: Annotated[str, typer.Option(help="with commas")] = DEFAULT_WAYS,
        conversations: Annotated[int, typer.Option(min=1, max=10_000)] = full.conversations,
        turns: Annotated[int, typer.Option(min=1, max=1000)] = full.turns,
        rate: Annotated[float, typer.Option(min=0.001, help="conversations that begin in a second")] = full.rate_per_s,
        gap: Annotated[float, typer.Option(min=0.0, help="seconds between turns, on average")] = full.gap_s,
        prompt: Annotated[int, typer.Option(min=2, help="tokens of a first prompt")] = full.prompt_tokens,
        overlap: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of it common to all")] = full.overlap,
        new: Annotated[int, typer.Option(min=1, help="tokens that a later turn adds")] = full.new_tokens,
        answer: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = full.answer_tokens,
        rounds: Annotated[int, typer.Option(min=1, max=100)] = 3,
        quick: Annotated[bool, typer.Option(help="a small shape, under a minute once engines are up")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Your traffic's shape in every mode: TTFT, time per token, throughput, memory, expired sessions."""
        shape = QUICK if quick else Shape(
            conversations=conversations, turns=turns, rate_per_s=rate, gap_s=gap, prompt_tokens=prompt,
            overlap=overlap, new_tokens=new, answer_tokens=answer,
        )  # fmt: skip
        process.configure_logging("warning")
        rounds = min(rounds, 2) if quick else rounds
        if url:
            report = asyncio.run(measure(Where(url.rstrip("/"), nats, model), shape, ways_of(modes), rounds))
        else:
            with tempfile.TemporaryDirectory(prefix="kvbus-traffic-") as work_dir:
                options = FleetOptions(
                    model=model, engine=engine, prefill=prefill, decode=decode, work_dir=Path(work_dir)
                )
                report = asyncio.run(_measure_ours(options, shape, ways_of(modes), rounds))
        if as_json:
            typer.echo(report.json())
        else:
            _show(report)
        if report.conditions["differing_answers"]:
            raise CommandFailed("answers differ between modes: with greedy sampling they must not")
