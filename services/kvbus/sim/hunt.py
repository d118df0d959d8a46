"""Many runs: one after the other or in a few processes, with what they have come to."""

import gc
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvbus.errors import ConfigError
from kvbus.sim.run import ALL_FAULTS, Result, run_seed
from kvbus.sim.stock_run import STOCK_FAULTS, run_stock_seed
from kvbus.sim.talk_run import run_talk_seed

Protocol = Literal["kvbus", "stock"]
World = Literal["all", "push", "reuse"]
"""Single prompts and matcher processes; or conversations, requests of several prompts and matchers in engines. `all`
takes the second one for every third seed, since it costs three times as much."""
REUSE_EVERY = 3
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


def runner_of(protocol: Protocol, world: World = "all") -> Callable[..., Result]:
    """What runs one seed."""
    if protocol == "stock":
        return run_stock_seed
    return {"all": run_any_seed, "push": run_seed, "reuse": run_talk_seed}[world]


def run_any_seed(seed: int, faults: frozenset[str] = ALL_FAULTS, *, tell: bool = False) -> Result:
    """The seed decides about its world."""
    return (run_seed if seed % REUSE_EVERY else run_talk_seed)(seed, faults, tell=tell)


def hunt(
    protocol: Protocol,
    faults: frozenset[str],
    *,
    first: int,
    runs: int,
    seconds: float,
    jobs: int,
    world: World = "all",
) -> Iterator[Hunt]:
    """The sum so far, after every batch; the last one is the sum of all. At most `runs` runs and `seconds` seconds."""
    total, began_s = Hunt(), time.monotonic()
    batches = [
        Work(protocol, world, faults, start, min(BATCH, first + runs - start))
        for start in range(first, first + runs, BATCH)
    ]
    pool = multiprocessing.get_context("spawn").Pool(jobs, _leave_interrupts) if jobs > 1 else None
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


class Work(NamedTuple):
    """So many seeds of one kind."""

    protocol: Protocol
    world: World
    faults: frozenset[str]
    first: int
    runs: int


def _leave_interrupts() -> None:
    """Ctrl-C is the parent's: it sums up what is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _batch(work: Work) -> Hunt:
    protocol, world, faults, first, runs = work
    run, part = runner_of(protocol, world), Hunt()
    gc.disable()  # a world is one big cycle: collected now and then, it costs a fifth less
    for seed in range(first, first + runs):
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
