"""What is counted of the engines' prefix caches, as this router knows them. Names are the catalogue's."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvbus.metrics.catalogue import BY_NAME
from kvbus.router.cache_index import CacheFacts


class CacheMetrics:
    """Adds its metrics to the router's `registry`; `show` brings them up to now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._blocks = self._gauge("kvbus_router_cache_blocks", "max")
        self._exact = self._gauge("kvbus_router_cache_exact", "min")
        self._marks = self._gauge("kvbus_router_cache_marks", "max")
        self._gaps = self._counter("kvbus_router_cache_gaps")
        self._recoveries = self._counter("kvbus_router_cache_recoveries")
        self._told: dict[str, CacheFacts] = {}

    def show(self, facts: Mapping[str, CacheFacts], marks: int) -> None:
        """What is known now."""
        self._marks.set(marks)
        for engine_id in self._told.keys() - facts.keys():
            self._blocks.labels(engine_id).set(0)
            del self._told[engine_id]
        for engine_id, now in facts.items():
            before = self._told.get(engine_id)
            self._blocks.labels(engine_id).set(now.blocks)
            self._exact.labels(engine_id).set(now.state == "exact")
            self._gaps.labels(engine_id).inc(max(0, now.gaps - (before.gaps if before else 0)))
            self._recoveries.labels(engine_id).inc(max(0, now.recoveries - (before.recoveries if before else 0)))
            self._told[engine_id] = now

    def _gauge(self, name: str, mode: str) -> Gauge:
        metric = BY_NAME[name]
        return Gauge(name, metric.text, metric.labels, registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _counter(self, name: str) -> Counter:
        metric = BY_NAME[name]
        return Counter(name, metric.text, metric.labels, registry=self._registry)
