"""Settings of `kvbus sim-engine`: flags, then KVBUS_SIM_ENGINE_<NAME>, then the file's table [sim_engine]."""

import msgspec

from kvbus.errors import ConfigError
from kvbus.settings import load

SECTION = "sim_engine"
BLOCKS_MIN = 2


class LightSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One light engine. How it takes part on the bus is `EngineSettings`, as for a real one."""

    nats: str = "nats://127.0.0.1:4222"
    """Empty: no bus; the engine serves by itself."""
    engine_id: str = ""
    """Stable name, unique on the bus; empty: the role and the port."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    advertise: str = ""
    """URL for routers; its host is also where other engines write to. Empty: made from host and port."""
    drain_s: float = 30.0
    token_us: float = 2000.0
    """What a step takes in which answers grow, in microseconds."""
    prefill_tokens_per_s: float = 50_000.0
    """How fast prompts are computed; 0: at once."""
    blocks: int = 512
    block_size: int = 32
    """Tokens in a block."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Tokens of one step: a longer prompt is computed in chunks."""
    max_model_len: int = 8192
    eos_every: int = 64
    """An answer ends by itself after so many tokens on average; 0: never."""
    kv_bytes_per_token: int = 1024
    """What a token's KV is said to weigh, in PushDone and for `link_mb_per_s`."""
    link_mb_per_s: float = 0.0
    """How fast KV moves to another engine; 0: as fast as TCP does."""

    def checked(self) -> "LightSettings":
        """These settings, or ConfigError."""
        for name, least in (("blocks", BLOCKS_MIN), ("block_size", 1), ("max_num_seqs", 1), ("max_model_len", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"setting {name} of {SECTION} is {getattr(self, name)}: it must be at least {least}")
        for name in ("token_us", "prefill_tokens_per_s", "eos_every", "link_mb_per_s", "drain_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"setting {name} of {SECTION} is {getattr(self, name)}: it must not be negative")
        if self.max_num_batched_tokens < 1:
            raise ConfigError(f"setting max_num_batched_tokens of {SECTION} must be at least 1")
        return self


def light_settings(flags: dict[str, object]) -> LightSettings:
    """Read the settings. Raises ConfigError."""
    return load(LightSettings, SECTION, flags).checked()
