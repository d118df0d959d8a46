"""What a matcher process can be told."""

from kvbus.bus import BusSettings
from kvbus.errors import ConfigError
from kvbus.matcher.partition import Partition


class MatcherSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of `kvbus matcher`: flag, KVBUS_MATCHER_<NAME>, file section `[matcher]`."""

    partition: str = ""
    """`0/4`: of four matchers, the first, by producer engine. Empty: all of them."""
    metrics_port: int = 0
    """Port of /metrics; 0: none."""
    metrics_host: str = "127.0.0.1"
    transfers_max: int = 10_000
    """Open transfers; a registration beyond it is refused."""
    tombstone_s: float = 300.0
    tombstones_max: int = 100_000
    engine_unknown_max_s: float = 1.0
    """How long a registration waits for the card of an engine that is not known."""
    lease_max_s: float = 120.0
    """How far back the stream is replayed after a start, the router's own deadline; a consumer that still waits after
    that registers again by itself."""

    def checked(self) -> "MatcherSettings":
        """These settings, or ConfigError."""
        Partition.parse(self.partition)
        for name in ("transfers_max", "tombstones_max", "tombstone_s", "lease_max_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"setting {name} of matcher is {getattr(self, name)}: it must be above 0")
        return self
