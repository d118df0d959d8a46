"""A reuse process's numbers for Prometheus."""

from collections.abc import Iterator

from kvbus.bus import Bus
from kvbus.metrics.page import bus_readings, reading
from kvbus.metrics.tally import Reading
from kvbus.reuse.service import ReuseService

GRANTED = "granted"
LOOKED = "looked"


def readings(service: ReuseService, bus: Bus) -> Iterator[Reading]:
    """All of them, now. Called by the page's thread: reads counts, changes nothing."""
    counts = dict(service.counters)
    asks = {event: count for (what, event), count in counts.items() if what == "asks"}
    for (what, event), count in counts.items():
        if what != "asks":
            yield reading(f"kvbus_reuse_{what}", count, event)
        elif event not in (GRANTED, LOOKED):
            yield reading("kvbus_reuse_misses", count, event)
    yield reading("kvbus_reuse_asks", sum(asks.values()))
    yield reading("kvbus_reuse_grants", asks.get(GRANTED, 0))
    yield reading("kvbus_reuse_looks", asks.get(LOOKED, 0))
    yield reading("kvbus_reuse_claims_lost", service.claims_lost)
    yield reading("kvbus_reuse_keys", service.key_count)
    yield reading("kvbus_reuse_engines", len(service.engines))
    yield from bus_readings(bus.counters, connected=bus.connected)
