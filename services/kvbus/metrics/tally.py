"""Counts, values and durations of one process, without any library: cheap enough for an engine's own thread.

Read in two ways: as a whole (`readings`, `histograms`) where the process serves its own page, or as what is new
(`take`) where another process serves it, as vLLM's API server does for its scheduler and ranks.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvbus.metrics.catalogue import BY_NAME, Metric

PENDING_MAX = 1024
"""Durations of one kind that wait for `take`; where nobody takes, the rest are counted and not kept."""
SEPARATOR = "\x1f"

Change = dict[str, dict[str, Any]]
"""What is new: `counters` by how much, `gauges` to what, `histograms` each value; keys are of `key_of`. Plain data."""


class Reading(NamedTuple):
    """One counter or gauge."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class Distribution(NamedTuple):
    """One histogram: how many values fell into each bucket (the last is above all bounds), and their sum."""

    metric: Metric
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    total: float


class _Histogram:
    def __init__(self, metric: Metric) -> None:
        self.counts = [0] * (len(metric.buckets) + 1)
        self.total = 0.0
        self.pending: list[float] = []


class Tally:
    """From any thread. Labels are given in the order in which the catalogue names them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._told: dict[str, float] = {}

    def add(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Count `by` more."""
        key = key_of(name, labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0.0) + by

    def total(self, name: str, value: float, *labels: str) -> None:
        """What another object has counted so far."""
        with self._lock:
            self._counters[key_of(name, labels)] = value

    def put(self, name: str, value: float, *labels: str) -> None:
        """A gauge's value now."""
        with self._lock:
            self._gauges[key_of(name, labels)] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """A duration, in the metric's unit."""
        key = key_of(name, labels)
        metric = BY_NAME[name]
        with self._lock:
            histogram = self._histograms.get(key)
            if histogram is None:
                histogram = self._histograms[key] = _Histogram(metric)
            histogram.counts[bisect_left(metric.buckets, value)] += 1
            histogram.total += value
            if len(histogram.pending) < PENDING_MAX:
                histogram.pending.append(value)

    def readings(self) -> Iterator[Reading]:
        """All counters and gauges."""
        with self._lock:
            values = self._counters | self._gauges
        for key, value in values.items():
            name, labels = named(key)
            yield Reading(BY_NAME[name], labels, value)

    def histograms(self) -> Iterator[Distribution]:
        """All histograms."""
        with self._lock:
            copies = [(key, tuple(one.counts), one.total) for key, one in self._histograms.items()]
        for key, counts, total in copies:
            name, labels = named(key)
            yield Distribution(BY_NAME[name], labels, counts, total)

    def take(self) -> Change:
        """What is new since the last time; empty when nothing is."""
        with self._lock:
            counters = {
                key: value - self._told.get(key, 0.0)
                for key, value in self._counters.items()
                if value != self._told.get(key, 0.0)
            }
            gauges = {key: value for key, value in self._gauges.items() if value != self._told.get(key)}
            self._told |= self._counters | gauges
            durations = {key: one.pending for key, one in self._histograms.items() if one.pending}
            for key in durations:
                self._histograms[key].pending = []
        parts: Change = {"counters": counters, "gauges": gauges, "histograms": durations}
        return {kind: part for kind, part in parts.items() if part}


def key_of(name: str, labels: tuple[str, ...]) -> str:
    """Name and labels in one string."""
    return SEPARATOR.join((name, *labels))


def named(key: str) -> tuple[str, tuple[str, ...]]:
    """Name and labels out of that string."""
    name, *labels = key.split(SEPARATOR)
    return name, tuple(labels)


def together(one: Change, other: Change) -> Change:
    """Both changes as one."""
    merged: Change = {kind: dict(part) for kind, part in one.items()}
    for key, value in other.get("counters", {}).items():
        counters = merged.setdefault("counters", {})
        counters[key] = counters.get(key, 0.0) + value
    merged.setdefault("gauges", {}).update(other.get("gauges", {}))
    for key, values in other.get("histograms", {}).items():
        histograms = merged.setdefault("histograms", {})
        histograms[key] = [*histograms.get(key, ()), *values]
    return {kind: part for kind, part in merged.items() if part}
