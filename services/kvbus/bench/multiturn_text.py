"""The report of `kvbus bench multiturn` as text: a table with the prefix cache off and one with it on, and the bars."""

import io

from rich import box
from rich.console import Console
from rich.table import Table

from kvbus.bench.handoff_bars import NONE, Bar
from kvbus.bench.report import Arm, Metric, Report

WIDTH = 150
FASTER_THAN_OFF = 3.3
BLOCK = 32
ROWS = (
    ("ttft_ms", "time to first token, ms"),
    ("ask_ms", "  of that, asking the reuse process, ms"),
    ("prompt_tokens", "tokens of the prompt"),
    ("computed_tokens", "  computed by prefill"),
    ("cached_tokens", "  found in prefill's prefix cache"),
    ("taken_tokens", "  given back to prefill by decode"),
    ("received_tokens", "  sent to decode by prefill"),
    ("cpu_ms_prefill", "CPU ms of prefill's engine, the turn and the pause after it"),
    ("cpu_ms_decode", "CPU ms of decode's engine"),
)
CACHES = {"off": "prefill's prefix cache off", "on": "prefill's prefix cache on"}


def text_of(report: Report) -> str:
    """The whole report, ready for a README."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None)
    conditions = report.conditions
    console.print(
        f"kvbus bench multiturn, {conditions['date']}, commit {conditions['commit']}, {conditions['machine']}"
    )
    console.print(f"{conditions['what']}; load average {conditions['load_average']}")
    console.print("Cells: median / 99th percentile ± half the distance between the quartiles of the rounds' medians.\n")
    for cache, title in CACHES.items():
        console.print(_table(report.arms, title, conditions["histories"], cache))
    console.print(_ratios(report))
    bars = bars_of(report)
    for bar in bars:
        console.print(bar.line())
    console.print(f"\n{sum(bar.met for bar in bars)} of {len(bars)} bars met")
    if conditions["not_reused"]:
        console.print(f"later turns that kvbus did not reuse on: {', '.join(conditions['not_reused'])}")
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _table(arms: list[Arm], title: str, histories: list[int], cache: str) -> Table:
    table = Table("history", "", *(arm.name for arm in arms), title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for history in histories:
        first = str(history)
        for name, label in ROWS:
            found = [arm.metrics.get(f"{name}_{history}_{cache}", NONE) for arm in arms]
            if any(value.n for value in found):
                table.add_row(first, label, *(_cell(value) for value in found))
                first = ""
        table.add_section()
    return table


def _ratios(report: Report) -> Table:
    """How many times faster than each other arm kvbus is, and how far the spread of both lets that be wrong."""
    by_name = {arm.name: arm.metrics for arm in report.arms}
    others = [name for name in by_name if name != "kvbus_reuse"]
    title = "Median TTFT of kvbus_reuse: times faster than the other arms (least to most, by the spread of both)"
    table = Table("history", "prefix cache", *others, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for cache in CACHES:
        for history in report.conditions["histories"]:
            key = f"ttft_ms_{history}_{cache}"
            ours = by_name.get("kvbus_reuse", {}).get(key, NONE)
            table.add_row(str(history), cache, *(ratio_of(by_name[name].get(key, NONE), ours) for name in others))
    return table


def ratio_of(theirs: Metric, ours: Metric) -> str:
    """`11.6 (9.5 to 12.9)`, or a dash where one of them was not measured."""
    if not (theirs.n and ours.n and ours.p50):
        return "-"
    least = max(0.0, theirs.p50 - theirs.spread) / (ours.p50 + ours.spread)
    below = ours.p50 - ours.spread
    most = f"{(theirs.p50 + theirs.spread) / below:.1f}" if below > 0 else "?"
    return f"{theirs.p50 / ours.p50:.1f} ({least:.1f} to {most})"


def _cell(value: Metric) -> str:
    if not value.n:
        return "-"
    tail = f" / {value.p99:.4g}" if value.n > 1 and value.p99 != value.p50 else ""
    return f"{value.p50:.4g}{tail}" + (f" ±{value.spread:.2g}" if value.spread else "")


def bars_of(report: Report) -> list[Bar]:
    """What was asked, with the figures; only what the arms that ran allow to judge."""
    conditions, by_name = report.conditions, {arm.name: arm.metrics for arm in report.arms}
    off, stock, ours = (by_name.get(name, {}) for name in ("off", "stock_bidirectional", "kvbus_reuse"))
    count = f"{conditions['differing_answers']} of {conditions['compared_answers']}"
    bars = [Bar("answers that differ between arms", count, conditions["differing_answers"] == 0)]
    turns, reused = conditions["later_turns_cache_off"], conditions["reused"]
    if turns:
        what = "later turns with the prefix cache off that took KV back from decode"
        bars.append(Bar(what, f"{reused} of {turns}", reused == turns))
    histories: list[int] = conditions["histories"]
    bars += _faster(off, ours, f"{max(histories)}_off")
    for cache in CACHES:
        for history in histories:
            bars += _not_slower(stock, ours, f"{history}_{cache}")
    for history in histories:
        bars += _computed(ours, f"{history}_off", conditions["new"] + BLOCK)
    return bars


def _faster(off: dict[str, Metric], ours: dict[str, Metric], key: str) -> list[Bar]:
    they, we = off.get(f"ttft_ms_{key}", NONE), ours.get(f"ttft_ms_{key}", NONE)
    if not (they.n and we.n):
        return []
    figures = f"{we.p50:.5g} against {they.p50:.5g} ms, {they.p50 / we.p50:.1f} times"
    return [Bar(f"median TTFT at least {FASTER_THAN_OFF} times faster than off, {key}", figures,
                they.p50 >= FASTER_THAN_OFF * we.p50)]  # fmt: skip


def _not_slower(stock: dict[str, Metric], ours: dict[str, Metric], key: str) -> list[Bar]:
    they, we = stock.get(f"ttft_ms_{key}", NONE), ours.get(f"ttft_ms_{key}", NONE)
    if not (they.n and we.n):
        return []
    figures = f"{we.p50:.5g} ±{we.spread:.2g} against {they.p50:.5g} ±{they.spread:.2g} ms"
    met = we.p50 <= they.p50 + we.spread + they.spread
    return [Bar(f"median TTFT not above stock bidirectional's beyond the spread, {key}", figures, met)]


def _computed(ours: dict[str, Metric], key: str, limit: int) -> list[Bar]:
    we = ours.get(f"computed_tokens_{key}", NONE)
    if not we.n:
        return []
    return [Bar(f"prefill computes at most the new tokens and a block ({limit}), p99, {key}", f"{we.p99:g}",
                we.p99 <= limit)]  # fmt: skip
