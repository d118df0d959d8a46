"""What `kvbus up` is to start, and what it has started."""

from pathlib import Path
from typing import Literal

import msgspec

from kvbus.local.children import Child
from kvbus_schemas import Role


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    prefill: int = 1
    decode: int = 1
    model: str = "tiny"
    """A directory or name that vLLM knows, or `tiny` or `small`: a seeded test model."""
    engine: Literal["vllm", "sim"] = "vllm"
    port: int = 0
    """The router's; 0 takes a free one."""
    nats: str = ""
    """An existing NATS; empty: an embedded one."""
    work_dir: Path = Path(".kvbus")
    """Logs, seeded models and the embedded server's streams."""
    engine_arguments: list[str] = []
    """More arguments of every `vllm serve`, or of every `kvbus sim-engine`."""
    prefill_arguments: list[str] = []
    decode_arguments: list[str] = []
    router_arguments: list[str] = []
    """More arguments of every `kvbus router`."""
    engine_settings: dict[str, str] = {}
    """More KVBUS_ENGINE_... settings of every engine."""
    environ: dict[str, str] = {}
    """More environment of every process but plain vLLM."""
    matchers: int = 1
    reuse: int = 1
    """Reuse processes."""
    console: bool = False
    """Also serve the page of `kvbus console`."""
    console_port: int = 0
    """Its port; 0 takes a free one."""
    metrics: bool = False
    """Matchers and reuse processes serve /metrics, and there is an observer."""
    routers: int = 1
    secure: bool = False
    """Everybody has a key of its own, in `work_dir`/auth, and NATS lets it say only what is its own."""
    plain: bool = False
    """Also start one engine that is on no bus, to compare with: a plain vLLM server, or a light engine."""


class EngineProcess(msgspec.Struct, kw_only=True):
    """One started engine."""

    engine_id: str
    role: Role | Literal["plain"]
    url: str
    child: Child
