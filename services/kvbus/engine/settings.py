"""Settings of the connector: `kv_connector_extra_config`, then `KVBUS_ENGINE_...` and `KVBUS_NATS`, then the file."""

from typing import Any, Literal

from kvbus.bus import BusSettings
from kvbus.settings import load


class EngineSettings(BusSettings, frozen=True, forbid_unknown_fields=True):
    """How an engine takes part on the bus."""

    http_url: str = ""
    """Where routers reach this engine's HTTP server, for example http://10.0.0.5:8000; empty: it is not routed to."""
    incarnation: str = ""
    """Set by `kvbus engine`; empty: vLLM's own instance id, which is new at every start."""
    progressive: bool = True
    """Write a chunk's blocks while the next chunk computes; False: the whole prompt at the end."""
    matcher: Literal["process", "engine"] = "process"
    """`engine`: this prefill pairs its own transfers; then no matcher process may run for it."""
    local_below_blocks: int = 1
    """Decode computes by itself what is shorter than this many blocks, instead of waiting for a push."""
    wait_max_ms: float = 250.0
    """How long an engine that only waits sleeps between two looks, at most. Messages, requests and its
    ranks wake it earlier."""
    nixl_progress_delay_us: int = 1000
    """Pause of NIXL's progress thread; 0 lets it spin on a core of its own (NIXL's default)."""
    reuse_ttl_s: float = 480.0
    """Seconds for which a decode engine keeps a conversation's blocks, from the end of the turn; never extended."""
    reuse_min_tokens: int = 64
    """Fewer reusable tokens than this are recomputed."""
    reuse_wait_s: float = 5.0
    """Longest time that a prefill waits for a conversation's KV before it computes all of it."""
    reuse_blocks_max: float = 0.5
    """Share of the engine's blocks that conversations may hold."""
    cache_events: bool = True
    """Tell routers what the prefix cache holds, if the engine has one."""
    cache_secret: str = ""
    """Key of the names of cached blocks, the same for all engines; empty: anybody on the bus who guesses a prompt can
    tell that it was asked."""


# Options of the stock connector that may stand beside ours.
STOCK_OPTIONS = frozenset({"backends", "num_threads", "enforce_handshake_compat", "kv_lease_duration"})


def engine_settings(extra_config: dict[str, Any]) -> EngineSettings:
    """Read the settings. Raises ConfigError on an unknown name, with the nearest known one."""
    return load(EngineSettings, "engine", {k: v for k, v in extra_config.items() if k not in STOCK_OPTIONS})
