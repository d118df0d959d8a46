"""The console's own numbers for Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from kvbus.console.core import ConsoleCore
from kvbus.console.feed import Feed
from kvbus.console.hub import Hub


class Metrics:
    """Named kvbus_console_*; read when somebody asks."""

    def __init__(self, core: ConsoleCore, feed: Feed, hub: Hub) -> None:
        self._core, self._feed, self._hub = core, feed, hub
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._feed.state
        for name, help_text, count in (
            ("messages", "Messages heard", state.messages),
            ("undecodable", "Messages that were none of the bus's", state.undecodable),
            ("gaps", "Messages that a sender counted and the console never heard", state.gaps),
            ("dropped", "Messages that came faster than they could be taken", state.dropped),
            ("dead_letters", "Dead letters that others reported", self._core.dead_letters),
            ("reconnects", "Times that NATS came back", state.reconnects),
        ):
            yield CounterMetricFamily(f"kvbus_console_{name}", help_text, value=count)
        for name, help_text, value in (
            ("bus_connected", "1 while NATS is reachable", float(state.connected)),
            ("bus_round_trip_seconds", "To NATS and back", state.round_trip_ms / 1000),
            ("browsers", "Pages that are open", float(len(self._hub))),
            ("requests", "Requests that are kept to look at", float(len(self._core.book))),
        ):
            yield GaugeMetricFamily(f"kvbus_console_{name}", help_text, value=value)
