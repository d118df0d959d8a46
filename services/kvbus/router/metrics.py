"""Prometheus. With several workers on one port each value is summed over them (prometheus_client's multiprocess mode,
switched on by PROMETHEUS_MULTIPROC_DIR before this module is imported)."""

import os
from collections.abc import Callable
from functools import cache

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from kvbus.metrics.catalogue import BY_NAME
from kvbus.metrics.page import COUNTED

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
BUS_EVENTS = frozenset(
    ("published", "received", "dead_letters", "gaps", "handler_errors", "reconnects", "dropped", "denied")
)


class Metrics:
    """The router's metrics, as `kvbus.metrics.catalogue` lists them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("kvbus_router_requests")
        self._ttft = self._histogram("kvbus_router_ttft_seconds")
        self._duration = self._histogram("kvbus_router_duration_seconds")
        self._retries = self._counter("kvbus_router_retries")
        self._cancels = self._counter("kvbus_router_cancels")
        self._reuse = self._counter("kvbus_router_reuse")
        self._reuse_tokens = self._counter("kvbus_router_reuse_tokens")
        self._held = self._gauge("kvbus_router_held_blocks", mode="max")
        self._in_flight = self._gauge("kvbus_router_requests_in_flight")
        self._waiting = self._gauge("kvbus_router_requests_waiting")
        self._connections = self._gauge("kvbus_router_connections")
        self._engines = self._gauge("kvbus_router_engines", mode="max")
        self._unsent = self._counter("kvbus_router_unsent")
        self._bus_connected = self._gauge("kvbus_bus_connected", mode="min")
        self._bus = {event: self._counter(f"kvbus_bus_{event}") for event in sorted(BUS_EVENTS)}
        self._bus_told: dict[str, int] = {}
        self.count_request = self._request_counter()
        self._reuse_child = cache(self._reuse.labels)
        self._reuse_child("hit", "")  # from the start, so that the share of hits is 0 and not unknown
        self._holders: set[str] = set()

    def retried(self) -> None:
        """A request is dispatched once more."""
        self._retries.inc()

    def cancelled(self, reason: str) -> None:
        """A transfer was cancelled."""
        self._cancels.labels(reason).inc()

    def reused(self, header: str) -> None:
        """A look-up for reusable KV ended as X-Kvbus-Reuse says: `hit ...` or `miss ...`."""
        result, _, detail = header.partition(" ")
        name, _, value = detail.partition("=")
        self._reuse_child(result, value if name == "reason" else "").inc()
        if name == "tokens":
            self._reuse_tokens.inc(int(value))

    def gauges(
        self, *, in_flight: int, waiting: int, connections: int, bus_connected: bool, engines: dict[str, int],
        bus: dict[str, int], held_blocks: dict[str, int],
    ) -> None:  # fmt: skip
        """Set what is looked up only when somebody asks."""
        self._in_flight.set(in_flight)
        self._waiting.set(waiting)
        self._connections.set(connections)
        self._bus_connected.set(bus_connected)
        for role, count in engines.items():
            self._engines.labels(role).set(count)
        for kind, count in bus.items():
            counter = self._unsent if kind == "unsent" else self._bus.get(COUNTED.get(kind, kind))
            more = count - self._bus_told.get(kind, 0)
            if counter is not None and more > 0:
                counter.inc(more)
            self._bus_told[kind] = count
        for engine_id in self._holders - held_blocks.keys():
            self._held.labels(engine_id).set(0)
        self._holders |= held_blocks.keys()
        for engine_id, count in held_blocks.items():
            self._held.labels(engine_id).set(count)

    def text(self) -> bytes:
        """The exposition."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)

    def _counter(self, name: str) -> Counter:
        metric = BY_NAME[name]
        return Counter(name, metric.text, metric.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = BY_NAME[name]
        return Histogram(name, metric.text, metric.labels, buckets=metric.buckets, registry=self.registry)

    def _gauge(self, name: str, mode: str = "livesum") -> Gauge:
        metric = BY_NAME[name]
        return Gauge(name, metric.text, metric.labels, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _request_counter(self) -> "Callable[[str, int, float, float], None]":
        """Counts (mode, status, ttft_s, duration_s); looks label children up once, as that costs most."""

        @cache
        def children(mode: str, status: int) -> tuple[Counter, Histogram, Histogram]:
            return self._requests.labels(mode, str(status)), self._ttft.labels(mode), self._duration.labels(mode)

        def count(mode: str, status: int, ttft_s: float, duration_s: float) -> None:
            requests, ttft, duration = children(mode, status)
            requests.inc()
            duration.observe(duration_s)
            if ttft_s:
                ttft.observe(ttft_s)

        return count
