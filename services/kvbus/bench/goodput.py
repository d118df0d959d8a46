"""`kvbus bench goodput`: which policy serves the most requests in time, on a public workload, by simulation.

Goodput is requests a second that have their first token and their pace of tokens within the limits; a request that is
refused, or given up since it would be late, counts as missed. What things cost is in `kvbus.goodput.costs`.
"""

import datetime
import os
import platform
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvbus.bench.report import Report, say
from kvbus.errors import CommandFailed, ConfigError
from kvbus.goodput.run import POLICIES, QUICK, Plan, Verdict, arms_of, run, verdicts
from kvbus.goodput.traces import Ask, read_trace, summary

COLUMNS = [
    "goodput_rps",
    "good_percent",
    "rejected_percent",
    "hit_percent",
    "ttft_s",
    "ttft_p99_s",
    "not_early_percent",
]


def report_of(asks: list[Ask], plan: Plan, workload: str) -> Report:
    """Run everything."""
    found = run(asks, plan, say)
    conditions: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "workload": workload,
        "trace": summary(asks),
        "requests_a_run": min(plan.requests, len(asks)),
        "seeds": list(plan.seeds),
        "engines": f"{plan.setups[0].prefills} prefills, {plan.setups[0].decodes} decodes",
        "costs": msgspec.to_builtins(plan.costs),
        "verdicts": [msgspec.to_builtins(one) | {"met": one.met} for one in verdicts(found)],
    }
    return Report(bench="goodput", arms=arms_of(found), conditions=conditions)


def show(report: Report) -> list[str]:
    """The table, and what the default comes to against its rivals."""
    conditions = report.conditions
    typer.echo(
        f"kvbus bench goodput, {conditions['date']}: {conditions['workload']}, {conditions['requests_a_run']} requests "
        f"a run, seeds {conditions['seeds']}, {conditions['engines']}; simulated"
    )
    report.show(COLUMNS)
    lines = [_line(msgspec.convert(one, Verdict, strict=False)) for one in conditions["verdicts"]]
    for line in lines:
        typer.echo(line)
    return [line for line in lines if line.startswith("NOT")]


def _line(verdict: Verdict) -> str:
    met = "met    " if verdict.met else "NOT MET"
    return (
        f"{met}  weighed over {verdict.rival}, {verdict.setup}: {verdict.ratio:.3f} times its goodput "
        f"({verdict.low:.3f} to {verdict.high:.3f} by seed)"
    )


def register_bench(bench_app: typer.Typer) -> None:
    """Add `goodput` to the group `kvbus bench`."""

    @bench_app.command(name="goodput")
    def goodput(
        workload: Annotated[
            Path, typer.Option(help="a trace of Mooncake or Azure (their own files), or of kv-cache-tester")
        ],
        requests: Annotated[int | None, typer.Option(min=10, help="in a row, of each run [1500]")] = None,
        loads: Annotated[str, typer.Option(help="shares of what the prefills can do at best [0.6,0.9,1.2]")] = "",
        policies: Annotated[str, typer.Option(help=f"with commas [{','.join(POLICIES)}]")] = "",
        seeds: Annotated[int, typer.Option(min=1, help="each takes another part of the trace")] = 3,
        quick: Annotated[bool, typer.Option(help="three policies at one load, under a minute")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Goodput of the routing policies on a public workload, simulated. Exit code 1 when the default is beaten."""
        plan = QUICK if quick else Plan()
        given: dict[str, object] = {"requests": requests, "loads": _loads(loads), "seeds": tuple(range(1, seeds + 1))}
        given["policies"] = tuple(policies.split(",")) if policies else None
        plan = msgspec.structs.replace(plan, **{name: value for name, value in given.items() if value})
        report = report_of(read_trace(workload), plan, workload.name)
        if as_json:
            typer.echo(report.json())
            missed = [one for one in report.conditions["verdicts"] if not one["met"]]
        else:
            missed = show(report)
        if missed:
            raise CommandFailed(f"the default is beaten in {len(missed)} of {len(report.conditions['verdicts'])}")


def _loads(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in text.split(",") if one)
    except ValueError:
        found = (0.0,)
    if any(one <= 0 for one in found):
        raise ConfigError(f"--loads must be shares above 0 with commas, not {text!r}")
    return found
