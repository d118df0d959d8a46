"""Prometheus. With several workers on one port each value is summed over them (prometheus_client's multiprocess mode,
switched on by PROMETHEUS_MULTIPROC_DIR before this module is imported)."""

import os
from collections.abc import Callable
from functools import cache

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The router's metrics, named kvbus_router_*, and those of reuse."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = self.registry
        self._requests = Counter("kvbus_router_requests", "Requests answered", ["mode", "status"], registry=made)
        self._ttft = Histogram(
            "kvbus_router_ttft_seconds", "Arrival to first body byte", ["mode"], buckets=_SECONDS, registry=made
        )
        self._duration = Histogram(
            "kvbus_router_duration_seconds", "Arrival to the end", ["mode"], buckets=_SECONDS, registry=made
        )
        self._retries = Counter("kvbus_router_retries", "Dispatches after the first", registry=made)
        self._cancels = Counter("kvbus_router_cancels", "CancelOrdered published", ["reason"], registry=made)
        self._reuse = Counter("kvbus_reuse", "Requests by what was reused", ["result", "reason"], registry=made)
        self._reuse_tokens = Counter("kvbus_reuse_tokens", "Tokens that prefill took over", registry=made)
        self._held = Gauge(
            "kvbus_held_blocks", "Blocks kept for conversations", ["engine"], registry=made, multiprocess_mode="max"
        )
        self._in_flight = self._gauge("requests_in_flight", "Requests being served")
        self._waiting = self._gauge("requests_waiting", "Requests waiting for their turn")
        self._connections = self._gauge("connections", "Client connections")
        self._bus_connected = self._gauge("bus_connected", "1 while NATS is reachable", mode="min")
        self._engines = Gauge("kvbus_router_engines", "Engines alive", ["role"], registry=made, multiprocess_mode="max")
        self._bus = Gauge(
            "kvbus_router_bus_events", "Counters of the bus connection", ["kind"], registry=made,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.count_request = self._request_counter()
        self._reuse_child = cache(self._reuse.labels)
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
            self._bus.labels(kind).set(count)
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

    def _gauge(self, name: str, text: str, mode: str = "livesum") -> Gauge:
        return Gauge(f"kvbus_router_{name}", text, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

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
