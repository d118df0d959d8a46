"""What a reuse process can be told."""

from kvbus.bus import BusSettings
from kvbus.bus.bucket import Storage
from kvbus.errors import ConfigError
from kvbus.reuse.core import Rules


class ReuseSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of `kvbus reuse`: flag, KVBUS_REUSE_<NAME>, file section `[reuse]`."""

    min_tokens: int = 64
    """Offers of fewer tokens are released at once: computing them again is cheaper."""
    margin_s: float = 1.0
    """An offer with less left than this is a miss."""
    lifetime_max_s: float = 3600.0
    """No offer lives longer, whatever it says."""
    storage: Storage = "file"
    """Of the bucket of conversations, when it is made: `memory` loses them with its nats-server."""
    replicas: int = 1
    """nats-servers of a cluster that keep each conversation; 3 survives the loss of one."""
    lanes: int = 8
    """Questions, and offers, that are worked on at the same time."""
    memory_max: int = 50_000
    """Conversations for which this process remembers why they have no key; 150 bytes each."""
    catch_up_max_s: float = 600.0
    """How far back offers are looked for that were made while no reuse process was there."""
    metrics_port: int = 0
    """Port of /metrics; 0: none."""
    metrics_host: str = "127.0.0.1"

    def checked(self) -> "ReuseSettings":
        """These settings, or ConfigError."""
        for name in ("lifetime_max_s", "replicas", "lanes", "memory_max", "catch_up_max_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"setting {name} of reuse is {getattr(self, name)}: it must be above 0")
        for name in ("min_tokens", "margin_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"setting {name} of reuse is {getattr(self, name)}: it must be 0 or more")
        return self

    @property
    def rules(self) -> Rules:
        """The core's part."""
        return Rules(min_tokens=self.min_tokens, margin_s=self.margin_s, lifetime_max_s=self.lifetime_max_s)
