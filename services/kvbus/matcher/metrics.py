"""A matcher's numbers for Prometheus."""

from collections.abc import Callable, Iterator
from typing import Any

from kvbus.errors import ConfigError
from kvbus.matcher.core import MatcherCore


def serve_metrics(core: MatcherCore, is_active: Callable[[], bool], *, host: str, port: int) -> Callable[[], None]:
    """Serve /metrics until the returned function is called. Raises ConfigError when that cannot be done."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ConfigError("metrics_port needs prometheus-client: pip install 'kvbus[router]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(core, is_active))
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
    def __init__(self, core: MatcherCore, is_active: Callable[[], bool]) -> None:
        self._core = core
        self._is_active = is_active

    def collect(self) -> Iterator[Any]:
        """Called by the server's thread: reads counts, changes nothing."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        events = CounterMetricFamily("kvbus_matcher_events", "What the matcher has heard and done.", labels=["event"])
        for event, count in dict(self._core.counters).items():
            events.add_metric([event], count)
        refused = CounterMetricFamily("kvbus_matcher_refused", "Registrations that were refused.", labels=["reason"])
        for reason, count in dict(self._core.refused).items():
            refused.add_metric([reason], count)
        yield events
        yield refused
        for name, text, value in (
            ("open_transfers", "Transfers that are not over.", self._core.open_count),
            ("tombstones", "Transfers that are remembered as over.", self._core.tombstone_count),
            ("engines", "Engines that live.", self._core.engine_count),
            ("active", "1 on the matcher that publishes, 0 on a standby.", int(self._is_active())),
        ):
            yield GaugeMetricFamily(f"kvbus_matcher_{name}", text, value=value)
