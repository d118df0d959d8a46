"""What an observer can be told."""

from kvbus.bus import BusSettings
from kvbus.errors import ConfigError


class ObserverSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of `kvbus observer`: flag, KVBUS_OBSERVER_<NAME>, file section `[observer]`."""

    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    """Port of /metrics."""
    poll_s: float = 0.5
    """How often the trace is read."""
    lag_every_s: float = 5.0
    """How often it is measured how far the trace is behind, and how large it is."""

    def checked(self) -> "ObserverSettings":
        """These settings, or ConfigError."""
        for name in ("poll_s", "lag_every_s", "metrics_port"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"setting {name} of observer is {getattr(self, name)}: it must be above 0")
        return self
