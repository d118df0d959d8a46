"""A matcher's numbers for Prometheus."""

from collections.abc import Iterator

from kvbus.bus import Bus
from kvbus.matcher.service import MatcherService
from kvbus.metrics.page import bus_readings, reading
from kvbus.metrics.tally import Reading


def readings(service: MatcherService, bus: Bus) -> Iterator[Reading]:
    """All of them, now. Called by the page's thread: reads counts, changes nothing."""
    core = service.core
    for event, count in dict(core.counters).items():
        yield reading("kvbus_matcher_events", count, event)
    for reason, count in dict(core.refused).items():
        yield reading("kvbus_matcher_refused", count, reason)
    yield reading("kvbus_matcher_open_transfers", core.open_count)
    yield reading("kvbus_matcher_tombstones", core.tombstone_count)
    yield reading("kvbus_matcher_engines", core.engine_count)
    yield reading("kvbus_matcher_active", int(service.is_active()))
    yield from bus_readings(bus.counters, connected=bus.connected)
