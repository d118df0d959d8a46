"""A process's page for Prometheus. The only module beside the router's metrics that needs prometheus-client."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvbus.bus.settings import BusCounters
from kvbus.errors import ConfigError
from kvbus.metrics.catalogue import BY_NAME, Metric
from kvbus.metrics.tally import Distribution, Reading

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

COUNTED = {"slow_consumer_drops": "dropped", "permission_errors": "denied"}
"""Counters of the bus whose metric has another name."""

Source = Callable[[], Iterable[Reading | Distribution]]


def serve_page(source: Source, declared: Iterable[Metric], *, host: str, port: int) -> Callable[[], None]:
    """Serve /metrics until the returned function is called. Raises ConfigError when that cannot be done."""
    try:
        from prometheus_client import start_http_server
    except ImportError as error:
        raise ConfigError("metrics_port needs prometheus-client: pip install 'kvbus[router]'") from error
    try:
        server, thread = start_http_server(port, addr=host, registry=registry_of(source, declared))
    except OSError as error:
        raise ConfigError(f"cannot serve /metrics on {host}:{port}: {error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def registry_of(
    source: Source, declared: Iterable[Metric], labels: dict[str, str] | None = None
) -> "CollectorRegistry":
    """A registry that asks `source` at every scrape; `labels` are put before every metric's own. Of `declared`, those
    that have no value yet are named all the same."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector(source, tuple(declared), labels or {}))
    return registry


def reading(name: str, value: float, *labels: str) -> Reading:
    """A reading of the metric of that name."""
    return Reading(BY_NAME[name], labels, value)


def bus_totals(counters: BusCounters) -> dict[str, int]:
    """What the connection has counted, by metric."""
    return {name: getattr(counters, field) for name, field in _FIELDS.items()}


def bus_readings(counters: BusCounters, *, connected: bool) -> Iterator[Reading]:
    """What every process says of its bus."""
    yield reading("kvbus_bus_connected", int(connected))
    for name, value in bus_totals(counters).items():
        yield reading(name, value)


_FIELDS = {f"kvbus_bus_{COUNTED.get(field.name, field.name)}": field.name for field in fields(BusCounters)}


class _Collector:
    def __init__(self, source: Source, declared: tuple[Metric, ...], labels: dict[str, str]) -> None:
        self._source, self._declared, self._labels = source, declared, labels

    def describe(self) -> list[Any]:
        """Nothing: asking the source at registration would be too early for some."""
        return []

    def collect(self) -> Iterator[Any]:
        """Called by the server's thread: reads, changes nothing."""
        families = {metric.name: _family(metric, (*self._labels, *metric.labels)) for metric in self._declared}
        before = tuple(self._labels.values())
        for one in self._source():
            family, labels = families[one.metric.name], [*before, *one.labels]
            if isinstance(one, Distribution):
                family.add_metric(labels, _cumulative(one.metric, one.counts), one.total)
            else:
                family.add_metric(labels, one.value)
        yield from families.values()


def _family(metric: Metric, labels: tuple[str, ...]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.text, labels=labels)


def _cumulative(metric: Metric, counts: tuple[int, ...]) -> list[tuple[str, float]]:
    rows, sum_so_far = [], 0
    for bound, count in zip((*map(str, metric.buckets), "+Inf"), counts, strict=True):
        sum_so_far += count
        rows.append((bound, float(sum_so_far)))
    return rows
