"""A reuse process's numbers for Prometheus."""

from collections.abc import Callable, Iterator
from typing import Any

from kvbus.errors import ConfigError
from kvbus.reuse.service import ReuseService

GRANTED = "granted"
LOOKED = "looked"


def serve_metrics(service: ReuseService, *, host: str, port: int) -> Callable[[], None]:
    """Serve /metrics until the returned function is called. Raises ConfigError when that cannot be done."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ConfigError("metrics_port needs prometheus-client: pip install 'kvbus[router]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"cannot serve /metrics on {host}:{port}: {error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class _Collector:
    def __init__(self, service: ReuseService) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        """Called by the server's thread: reads counts, changes nothing."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = dict(self._service.counters)
        asks = {event: count for (what, event), count in counts.items() if what == "asks"}
        for what, text in (
            ("offers", "Offers of decode engines, by what became of them."),
            ("withdrawals", "Withdrawals, by what became of them."),
            ("released", "Offers whose holders were told to let go, by reason."),
        ):
            family = CounterMetricFamily(f"kvbus_reuse_{what}", text, labels=["event"])
            for (kind, event), count in counts.items():
                if kind == what:
                    family.add_metric([event], count)
            yield family
        misses = CounterMetricFamily("kvbus_reuse_misses", "Questions without a grant, by reason.", labels=["reason"])
        for event, count in asks.items():
            if event not in (GRANTED, LOOKED):
                misses.add_metric([event], count)
        yield misses
        yield CounterMetricFamily("kvbus_reuse_asks", "Questions.", value=sum(asks.values()))
        yield CounterMetricFamily("kvbus_reuse_grants", "Offers that were claimed.", value=asks.get(GRANTED, 0))
        yield CounterMetricFamily("kvbus_reuse_looks", "Offers that were only looked at.", value=asks.get(LOOKED, 0))
        lost = self._service.claims_lost
        yield CounterMetricFamily("kvbus_reuse_claims_lost", "Rounds in which somebody else was faster.", value=lost)
        yield GaugeMetricFamily("kvbus_reuse_keys", "Keys in the bucket of conversations.", self._service.key_count)
        yield GaugeMetricFamily("kvbus_reuse_engines", "Engines that live.", len(self._service.engines))
