"""Many runs: one after the other or in a few processes, with what they have come to."""

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvbus.errors import ConfigError
from kvbus.sim.run import ALL_FAULTS, Result, run_seed
from kvbus.sim.stock_run import STOCK_FAULTS, run_stock_seed

Protocol = Literal["kvbus", "stock"]
BATCH = 200
COLLECT_EVERY = 50
FOUND_MAX = 100
"""Seeds that are kept of each kind of finding."""


class Finding(NamedTuple):
    """One run that broke a rule."""

    seed: int
    rule: str
    text: str


@dataclass
class Hunt:
    """The sum of some runs."""

    runs: int = 0
    events: int = 0
    broken: int = 0
    """Runs that broke a rule."""
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, other: "Hunt") -> None:
        self.runs += other.runs
        self.events += other.events
        self.broken += other.broken
        self.counts.update(other.counts)
        for rule, findings in other.found.items():
            self.found[rule] = (self.found.get(rule, []) + findings)[:FOUND_MAX]

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "runs": self.runs,
            "events": self.events,
            "broken": self.broken,
            "seconds": round(self.seconds, 3),
            "counts": dict(self.counts),
            "found": {rule: [finding._asdict() for finding in each] for rule, each in self.found.items()},
        }


def faults_of(text: str) -> frozenset[str]:
    """`all`, `none`, or kinds with commas. Raises ConfigError on an unknown kind."""
    if text in ("all", "none"):
        return ALL_FAULTS if text == "all" else frozenset()
    kinds = frozenset(text.split(","))
    for kind in sorted(kinds - ALL_FAULTS):
        raise ConfigError(
            f"unknown kind of fault {kind!r}: choose all, none, or some of {', '.join(sorted(ALL_FAULTS))}"
        )
    return kinds


def runner_of(protocol: Protocol) -> Callable[..., Result]:
    """What runs one seed."""
    return run_stock_seed if protocol == "stock" else run_seed


def hunt(
    protocol: Protocol, faults: frozenset[str], *, first: int, runs: int, seconds: float, jobs: int
) -> Iterator[Hunt]:
    """The sum so far, after every batch; the last one is the sum of all. At most `runs` runs and `seconds` seconds."""
    total, began_s = Hunt(), time.monotonic()
    batches = [
        (protocol, faults, start, min(BATCH, first + runs - start)) for start in range(first, first + runs, BATCH)
    ]
    pool = multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else None
    try:
        for part in pool.imap(_batch, batches) if pool else map(_batch, batches):
            total.add(part)
            total.seconds = time.monotonic() - began_s
            yield total
            if seconds and total.seconds >= seconds:
                break
    finally:
        if pool is not None:
            pool.terminate()


def _batch(work: tuple[Protocol, frozenset[str], int, int]) -> Hunt:
    protocol, faults, start, count = work
    run, part = runner_of(protocol), Hunt()
    gc.disable()  # a world is one big cycle: collected now and then, it costs a fifth less
    for seed in range(start, start + count):
        if seed % COLLECT_EVERY == 0:
            gc.collect()
        result = run(seed, faults)
        part.runs += 1
        part.events += result.events
        part.counts.update(result.counts)
        if result.violations:
            part.broken += 1
            for violation in {violation.rule: violation for violation in reversed(result.violations)}.values():
                rule = STOCK_FAULTS.get(violation.rule, violation.rule) if protocol == "stock" else violation.rule
                part.found.setdefault(rule, []).append(Finding(seed, rule, violation.text))
    gc.enable()
    return part
