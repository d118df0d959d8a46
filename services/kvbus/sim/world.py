"""Virtual time: one heap of events, one seeded random source, processes that crash, pause and have clocks of their own.

A run is a pure function of its seed and its options. Nothing here reads a clock or an address.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple


class Violation(NamedTuple):
    """A rule of DESIGN.md section 7 that did not hold."""

    rule: str
    transfer_id: str
    text: str
    at_s: float


class Line(NamedTuple):
    """One line of the story."""

    at_s: float
    who: str
    about: str
    """The transfer that it is about; empty: the world."""
    what: str


class Process:
    """One operating system process. `rate` is how fast its clock runs."""

    __slots__ = ("alive", "backlog", "name", "offset_s", "paused", "paused_at_s", "rate", "resumed_at_s")

    def __init__(self, name: str, rate: float, offset_s: float) -> None:
        self.name = name
        self.rate, self.offset_s = rate, offset_s
        self.alive = True
        self.paused = False
        self.paused_at_s = 0.0
        self.resumed_at_s = 0.0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []


class World:
    """The events to come. `tell` keeps the story, which costs time."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        self.rng_seed = seed
        self.rng = Random(seed)
        self.now = 0.0
        self.current: Process | None = None
        self.tells = tell
        self.story: list[Line] = []
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self.events = 0
        self._heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def process(self, name: str, drift: float) -> Process:
        """A process whose clock is off by at most the share `drift`."""
        rng = self.rng
        rate = 1.0 + rng.uniform(-drift, drift) if drift else 1.0
        return Process(name, rate, rng.uniform(10.0, 1000.0))

    def after(self, delay_s: float, process: Process | None, work: Callable[..., None], *args: Any) -> None:
        """Call `work` in that process, `delay_s` from now: later if it is paused then, never if it is dead then."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._number, process, work, args))

    def local_s(self) -> float:
        """What the clock of the process that runs now shows."""
        process = self.current
        return self.now if process is None else process.offset_s + self.now * process.rate

    def run(self, until_s: float) -> bool:
        """Run until nothing is left (True), `until_s`, or the first violation."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            if heap[0][0] > until_s or self.violations:
                return False
            self.now, _, process, work, args = pop(heap)
            if process is not None:
                if not process.alive:
                    continue
                if process.paused:
                    process.backlog.append((work, args))
                    continue
            self.events += 1
            self.current = process
            work(*args)
        return not self.violations

    def pause(self, process: Process) -> None:
        """Stop a process where it stands."""
        process.paused, process.paused_at_s = True, self.now

    def resume(self, process: Process) -> None:
        """Let it go on: what came in meanwhile is worked off first, in order."""
        process.paused, process.resumed_at_s = False, self.now
        backlog, process.backlog = process.backlog, []
        for work, args in backlog:
            self.after(0.0, process, work, *args)

    def violate(self, rule: str, transfer_id: str, text: str) -> None:
        """A rule is broken; the run ends after this event."""
        self.violations.append(Violation(rule, transfer_id, text, self.now))
        self.tell("world", transfer_id, f"RULE BROKEN ({rule}): {text}")

    def tell(self, who: str, about: str, what: str) -> None:
        """Add to the story, if one is kept."""
        if self.tells:
            self.story.append(Line(self.now, who, about, what))
