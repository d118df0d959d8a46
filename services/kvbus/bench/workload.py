"""`kvbus bench workload`: a published multi-turn workload through the real router, for several lifetimes of what decode
keeps, against a cache that never forgets.

Turn gaps and shared prefixes are the trace's; tokens and time are scaled down (see `workload_trace`). Every lifetime
has a nats-server, matcher, reuse process, router and two light engines of its own, one lifetime after the other, with
the same sessions. The engines' own prefix caches find nothing, so that what is saved is saved by reuse.
"""

import asyncio
import datetime
import io
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvbus import process
from kvbus.bench.report import Arm, Metric, Report, deliver, metric, say
from kvbus.bench.workload_replay import BLOCK_SIZE, Replayed, replay
from kvbus.bench.workload_trace import BLOCK, Bound, Scale, Session, bound_of, read_sessions
from kvbus.errors import ConfigError

Say = Callable[[str], None]

FILE = "weka_kvcachetester_subset.jsonl.gz"
DIRECTORY_ENV = "KVBUS_WORKLOADS"
LIFETIMES_S = (30.0, 120.0, 480.0, 900.0)
QUICK_LIFETIMES_S = (30.0, 480.0)
FULL = Scale()
QUICK = Scale(time=100.0, sessions=8, window_s=900.0)
KV_BYTES = 131_072
"""KV of one token of Llama 3.1 8B in 16 bits: what held tokens are turned into bytes with."""
WIDTH = 150
ROWS = (
    ("turns", "turns"),
    ("later_turns", "  that are not the first of their session"),
    ("hits", "  that took KV back"),
    ("bound_hits", "  that could have, at best"),
    ("hit_percent", "hit rate of later turns, %"),
    ("saved_tokens", "prompt tokens saved, in the trace's tokens"),
    ("saved_percent", "  share of all prompt tokens, %"),
    ("bound_saved_percent", "  at best, %"),
    ("saved_of_ideal_percent", "  share of what the ideal saves, %"),
    ("expired_turns", "turns that came after the lifetime"),
    ("expired_sessions", "sessions with such a turn"),
    ("other_misses", "later turns missed for another reason"),
    ("held_mean_gb", "held by decode on average, GB"),
    ("held_max_gb", "held by decode at most, GB"),
    ("held_max_blocks", "  in blocks of the light engine"),
    ("latency_ms", "answer complete after, ms"),
)


async def run(
    sessions: list[Session], scale: Scale, lifetimes_s: tuple[float, ...], work_dir: Path, say: Say
) -> Report:
    """Replay the sessions for each lifetime. Raises CommandFailed."""
    ideal = bound_of(sessions, None)
    say(f"{len(sessions)} sessions, {ideal.turns} turns, {ideal.prompt_tokens} tokens after scaling")
    arms, misses = [ideal_arm(ideal, scale)], {}
    for lifetime_s in lifetimes_s:
        done = await replay(sessions, scale, lifetime_s, work_dir / f"{lifetime_s:g}s")
        arms.insert(-1, arm_of(done, scale, lifetime_s, ideal, bound_of(sessions, lifetime_s, BLOCK_SIZE)))
        misses[arms[-2].name] = dict(done.misses)
        say(f"lifetime {lifetime_s:g} s: {done.hits} of {done.later} later turns in {done.took_s:.0f} s")
    return Report(bench="workload", arms=arms, conditions=_conditions(sessions, scale, misses))


def arm_of(done: Replayed, scale: Scale, lifetime_s: float, ideal: Bound, bound: Bound) -> Arm:
    """What one lifetime came to. Tokens are the trace's."""
    gb = BLOCK_SIZE * scale.tokens * KV_BYTES / 1e9
    held = done.held or [0]
    figures = {
        "turns": done.turns,
        "later_turns": done.later,
        "hits": done.hits,
        "bound_hits": bound.hits,
        "hit_percent": _percent(done.hits, done.later),
        "saved_tokens": done.saved * scale.tokens,
        "saved_percent": _percent(done.saved, done.prompt_tokens),
        "bound_saved_percent": _percent(bound.saved, bound.prompt_tokens),
        "saved_of_ideal_percent": _percent(done.saved, ideal.saved),
        "expired_turns": done.misses["expired"],
        "expired_sessions": done.expired_sessions,
        "other_misses": done.misses.total() - done.misses["expired"],
        "held_mean_gb": sum(held) / len(held) * gb,
        "held_max_gb": max(held) * gb,
        "held_max_blocks": max(held),
    }
    metrics = {name: metric([[float(value)]]) for name, value in figures.items()}
    latency = metric([[value * 1e3 for value in done.latencies_s]])
    return Arm(f"{lifetime_s:g} s", metrics | {"latency_ms": latency})


def ideal_arm(ideal: Bound, scale: Scale) -> Arm:
    """A cache without limits, by computing."""
    saved = _percent(ideal.saved, ideal.prompt_tokens)
    figures = {
        "turns": ideal.turns,
        "later_turns": ideal.later,
        "hits": ideal.hits,
        "bound_hits": ideal.hits,
        "hit_percent": _percent(ideal.hits, ideal.later),
        "saved_tokens": ideal.saved * scale.tokens,
        "saved_percent": saved,
        "bound_saved_percent": saved,
        "saved_of_ideal_percent": 100.0,
    }
    return Arm("ideal", {name: metric([[float(value)]]) for name, value in figures.items()}, note="computed offline")


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def _conditions(sessions: list[Session], scale: Scale, misses: dict[str, dict[str, int]]) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": "/".join(f"{value:.1f}" for value in os.getloadavg()),
        "sessions": len(sessions),
        "scale": msgspec.to_builtins(scale),
        "kv_bytes_per_token": KV_BYTES,
        "misses": misses,
    }


def text_of(report: Report) -> str:
    """The report, ready for a README."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None)
    conditions, scale = report.conditions, report.conditions["scale"]
    console.print(f"kvbus bench workload, {conditions['date']}, {conditions['machine']}, "
                  f"load average {conditions['load_average']}")  # fmt: skip
    console.print(
        f"{conditions['sessions']} sessions; one token for {scale['tokens']} of the trace, {scale['time']:g} times "
        f"faster; the first {scale['window_s']:g} s of idle time of each session, pauses cut at "
        f"{scale['idle_max_s']:g} s; GB at {conditions['kv_bytes_per_token'] // 1024} KB of KV a token (Llama 3.1 8B)\n"
    )
    table = Table("", *(arm.name for arm in report.arms), box=box.SIMPLE_HEAD)
    for name, label in ROWS:
        table.add_row(label, *(_cell(arm.metrics.get(name)) for arm in report.arms))
    console.print(table)
    for name, reasons in conditions["misses"].items():
        said = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        console.print(f"later turns without reuse, lifetime {name}: {said or 'none'}")
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _cell(value: Metric | None) -> str:
    if value is None or not value.n:
        return "-"
    if value.n > 1:
        return f"{value.p50:.3g} / {value.p99:.3g}"
    return f"{value.p50:,.0f}" if value.p50 == int(value.p50) else f"{value.p50:.3g}"


def trace_file(given: Path | None) -> Path:
    """The trace to replay. Raises ConfigError when there is none."""
    if given is not None:
        return given
    directory = os.environ.get(DIRECTORY_ENV, "")
    path = Path(directory) / FILE
    if not directory or not path.is_file():
        raise ConfigError(
            f"no workload: give --trace FILE, or set {DIRECTORY_ENV} to a directory with {FILE} "
            "(from https://github.com/callanjfox/kv-cache-tester, Apache-2.0)"
        )
    return path


def register_bench(bench_app: typer.Typer) -> None:
    """Add `workload` to the group `kvbus bench`."""

    @bench_app.command(name="workload")
    def workload(
        trace: Annotated[Path | None, typer.Option(help=f"JSONL, may be gzipped [$KVBUS_WORKLOADS/{FILE}]")] = None,
        scale: Annotated[int | None, typer.Option(min=64, help="tokens of the trace for one of ours [64]")] = None,
        time_scale: Annotated[float | None, typer.Option(min=1.0, help="times faster than the trace [40]")] = None,
        sessions: Annotated[int | None, typer.Option(min=1, help="sessions of the trace [24]")] = None,
        lifetimes: Annotated[str, typer.Option(help="seconds of the trace, with commas [30,120,480,900]")] = "",
        quick: Annotated[bool, typer.Option(help="two lifetimes, under a minute")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
        out: Annotated[Path | None, typer.Option(help="also write the report to this file")] = None,
        work_dir: Annotated[Path | None, typer.Option(help="keep logs here")] = None,
    ) -> None:
        """Multi-turn sessions through the real router with light engines: what reuse saves, by its lifetime."""
        if scale is not None and scale % BLOCK:
            raise ConfigError(f"--scale must be a multiple of {BLOCK}, the trace's block, not {scale}")
        given = {"tokens": scale, "time": time_scale, "sessions": sessions}
        chosen = msgspec.structs.replace(QUICK if quick else FULL, **{k: v for k, v in given.items() if v is not None})
        lifetimes_s = _lifetimes(lifetimes) or (QUICK_LIFETIMES_S if quick else LIFETIMES_S)
        chosen = msgspec.structs.replace(chosen, idle_max_s=max(lifetimes_s) * 1.25)
        found = read_sessions(trace_file(trace), chosen)
        process.configure_logging("warning")
        with tempfile.TemporaryDirectory(prefix="kvbus-workload-") as temporary:
            report = asyncio.run(run(found, chosen, lifetimes_s, work_dir or Path(temporary), say))
        deliver(report, text_of, as_json=as_json, out=out)


def _lifetimes(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted(float(one) for one in text.split(",") if one))
    except ValueError:
        found = (0.0,)
    if any(one <= 0 for one in found):
        raise ConfigError(f"--lifetimes must be seconds with commas, not {text!r}")
    return found
