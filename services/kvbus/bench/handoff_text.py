"""The report of `kvbus bench handoff` as text: a table per point, CPU, and the bars."""

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvbus.bench.handoff_bars import bars_of
from kvbus.bench.report import Arm, Metric, Report

WIDTH = 170
ROWS = (
    ("finish_to_write_ms", "finished → last WRITE submitted, ms"),
    ("finish_to_start_ms", "finished → decode's start, ms"),
    ("register_to_order_ms", "registration → order in prefill, ms"),
    ("ttft_ms", "time to first token, ms"),
    ("tpot_ms", "time per output token, ms"),
    ("answer_ms", "the whole answer, ms"),
    ("requests_per_s", "requests per second"),
    ("tail_bytes", "bytes left when prefill ends"),
    ("writes", "WRITEs (pull: READs) per request"),
    ("bus_messages", "bus messages per request"),
    ("bus_bytes", "bus bytes per request"),
    ("cpu_ms_prefill_http", "CPU ms: prefill's HTTP server"),
    ("cpu_ms_prefill_scheduler", "  prefill's scheduler"),
    ("cpu_ms_prefill_worker", "  prefill's worker"),
    ("cpu_ms_decode_http", "  decode's HTTP server"),
    ("cpu_ms_decode_scheduler", "  decode's scheduler"),
    ("cpu_ms_decode_worker", "  decode's worker"),
    ("cpu_ms_matcher", "  matcher"),
    ("cpu_ms_nats", "  nats-server"),
)
CPU_ROWS = (
    ("idle_prefill_cpu_percent", "prefill idle"),
    ("idle_decode_cpu_percent", "decode idle"),
    ("waiting_prefill_cpu_percent", "prefill holds, decode has not come"),
    ("waiting_decode_cpu_percent", "decode waits, prefill has not come"),
)


def text_of(report: Report) -> str:
    """The whole report, ready for a README."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None)
    conditions = report.conditions
    console.print(f"kvbus bench handoff, {conditions['date']}, commit {conditions['commit']}, {conditions['machine']}")
    console.print(f"{conditions['what']}")
    console.print(f"load average {conditions['load_average']} (what else ran here is in all figures)")
    console.print("Finished: request_finished in prefill's scheduler. CPU: per request.")
    console.print("Cells: median / 99th percentile ± half the distance between the quartiles of the rounds' medians.\n")
    for key in conditions["points"]:
        length, _, concurrency = key.partition("_c")
        console.print(_table(report.arms, f"{length} tokens, {concurrency} at a time", ROWS, f"_{key}"))
    console.print(_table(report.arms, "Percent of a core, whole engine", CPU_ROWS, ""))
    bars = bars_of(report.arms, conditions["points"], conditions["differing_answers"])
    for bar in bars:
        console.print(bar.line())
    console.print(f"\n{sum(bar.met for bar in bars)} of {len(bars)} bars met")
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _table(arms: Sequence[Arm], title: str, rows: Sequence[tuple[str, str]], suffix: str) -> Table:
    table = Table("", *(arm.name for arm in arms), title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name, label in rows:
        found = [arm.metrics.get(name + suffix) for arm in arms]
        if any(found):
            table.add_row(label, *(_cell(value) for value in found))
    return table


def _cell(value: Metric | None) -> str:
    if value is None or not value.n:
        return "-"
    tail = f" / {value.p99:.4g}" if value.n > 1 and value.p99 != value.p50 else ""
    return f"{value.p50:.4g}{tail}" + (f" ±{value.spread:.2g}" if value.spread else "")
