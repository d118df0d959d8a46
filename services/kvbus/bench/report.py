"""Figures of a benchmark: median, 99th percentile, spread; as one JSON object or as a table."""

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 200
"""Columns where there is no terminal."""


class Metric(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one metric came to. `spread` is half the distance between the quartiles of the rounds' medians."""

    p50: float
    p99: float
    n: int
    mean: float = 0.0
    spread: float = 0.0


class Arm(msgspec.Struct, frozen=True):
    """One variant under test."""

    name: str
    metrics: dict[str, Metric]
    note: str = ""


class Report(msgspec.Struct, frozen=True):
    """The outcome of a benchmark."""

    bench: str
    arms: list[Arm]
    conditions: dict[str, Any] = {}

    def json(self) -> str:
        """One object, as `--json` prints it."""
        return msgspec.json.encode(self).decode()

    def show(self, columns: Sequence[str], console: Console | None = None) -> None:
        """A table with one row per arm."""
        table = Table("arm", *columns, title=self.bench)
        for arm in self.arms:
            cells = [_cell(arm.metrics.get(column)) for column in columns]
            table.add_row(arm.name + (f" ({arm.note})" if arm.note else ""), *cells)
        (console or Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)).print(table)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def metric(rounds: Iterable[Sequence[float]]) -> Metric:
    """Sum up the values of several rounds. Median and percentile over all values, spread over the rounds' medians."""
    kept = [list(values) for values in rounds if values]
    if not kept:
        return Metric(p50=0.0, p99=0.0, n=0)
    values = [value for one in kept for value in one]
    return Metric(
        p50=_short(statistics.median(values)),
        p99=_short(percentile(values, 0.99)),
        n=len(values),
        mean=_short(statistics.fmean(values)),
        spread=_short(_spread([statistics.median(one) for one in kept])),
    )


def _spread(medians: list[float]) -> float:
    if len(medians) < 2:  # noqa: PLR2004  (one round has no spread)
        return 0.0
    low, _, high = statistics.quantiles(medians, n=4, method="inclusive")
    return (high - low) / 2.0


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _cell(value: Metric | None) -> str:
    return "-" if value is None or not value.n else f"{value.p50:g} ±{value.spread:.2g}"


def say(text: str) -> None:
    """Progress, to stderr: the report goes to stdout."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def deliver(report: Report, text_of: Callable[[Report], str], *, as_json: bool, out: Path | None) -> None:
    """Print the report as one JSON object or as text, and write the same into the file `out`."""
    text = report.json() if as_json else text_of(report).rstrip("\n")
    if out is not None:
        out.write_text(text + "\n")
    print(text)  # noqa: T201
