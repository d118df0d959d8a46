"""What differs between vLLM versions, and what has to be changed inside vLLM, in one place."""

import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import vllm
import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
from vllm.v1.engine import EngineCoreRequestType

from kvbus.engine.identity import Identity
from kvbus.engine.settings import EngineSettings
from kvbus.errors import EngineError
from kvbus_schemas import LoadReported
from kvbus_schemas.presence import Role

SUPPORTED = ("0.32.",)
WAKEUP = EngineCoreRequestType.WAKEUP

LOOK_EVERY_S = 50e-6
LOOK_FOR_S = 2e-3
NAP_MAX_MS = 5


@dataclass(frozen=True)
class Payloads:
    compat_hash: str
    agents: dict[str, bytes]
    """NIXL agent metadata by `"<pp_rank>.<tp_rank>"`."""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse at start what would go wrong later. Raises EngineError."""
    version = vllm.__version__
    if not version.startswith(SUPPORTED):
        raise EngineError(f"vLLM {version} is not supported: install one of {', '.join(v + 'x' for v in SUPPORTED)}")
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise EngineError(
            f"this model has {len(kv_cache_config.kv_cache_groups)} KV cache groups (hybrid attention); "
            "kvbus moves models with one group: use the stock connector behind `kvbus router --static`"
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise EngineError("kvbus supports tensor parallelism only: set pipeline and context parallel sizes to 1")


def identity_of(vllm_config: Any, kv_cache_config: Any, settings: EngineSettings) -> Identity:
    """Who this engine is; the same in its scheduler and in all of its ranks."""
    transfer = vllm_config.kv_transfer_config
    role: Role = "prefill" if transfer.kv_role == "kv_producer" else "decode"
    return Identity(
        engine_id=transfer.engine_id,
        incarnation=settings.incarnation or vllm_config.instance_id,
        role=role,
        model=(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
        block_size=vllm_config.cache_config.block_size,
        num_blocks=kv_cache_config.num_blocks,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        pp_size=vllm_config.parallel_config.pipeline_parallel_size,
        max_model_len=vllm_config.model_config.max_model_len,
        vllm_version=vllm.__version__,
    )


def handshake_payloads(metadata: dict[tuple[int, int], Any]) -> Payloads:
    """The ranks' handshake payloads, ready for the card."""
    encoder = msgspec.msgpack.Encoder()
    hashes = {payload.compatibility_hash for payload in metadata.values()}
    if len(hashes) != 1:
        raise EngineError(f"the ranks of this engine disagree about their KV layout: {sorted(hashes)}")
    agents = {f"{pp}.{tp}": encoder.encode(payload) for (pp, tp), payload in metadata.items()}
    return Payloads(hashes.pop(), agents)


def agent_metadata_of(payload: bytes, compat_hash: str, engine_id: str) -> NixlAgentMetadata:
    """A peer's NIXL metadata, if its blocks mean the same bytes as ours. Raises EngineError naming both hashes."""
    handshake = msgspec.msgpack.Decoder(NixlHandshakePayload).decode(payload)
    if handshake.compatibility_hash != compat_hash:
        raise EngineError(
            f"{engine_id} has KV layout {handshake.compatibility_hash[:12]}, this engine has {compat_hash[:12]}: "
            "both need the same vLLM version, model, dtype and attention backend"
        )
    metadata: NixlAgentMetadata = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(handshake.agent_metadata_bytes)
    return metadata


def load_of(scheduler: Any, me: Identity, held_blocks: int) -> LoadReported | None:
    """The scheduler's load, read from another thread: a few integers, each right for itself."""
    if scheduler is None:
        return None
    running, waiting = scheduler.get_request_counts()
    tokens = sum(request.num_tokens for request in list(scheduler.requests.values()))
    return LoadReported(
        engine_id=me.engine_id,
        running=running,
        waiting=waiting,
        free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        total_blocks=me.num_blocks,
        tokens_in_flight=tokens,
        held_blocks=held_blocks,
    )


def quiet_nixl(delay_us: int) -> None:
    """Let NIXL's progress thread pause: its Python API starts it with a pause of 0, which spins a core."""
    if not delay_us:
        return
    import nixl._api as nixl_api

    agent = nixl_api.nixlBind.nixlAgent
    if getattr(agent, "kvbus_quiet", False):
        return

    def quiet_agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return agent(name, config)

    quiet_agent.kvbus_quiet = True  # type: ignore[attr-defined]
    nixl_api.nixlBind.nixlAgent = quiet_agent


def nap_between_messages() -> None:
    """Let readers of vLLM's shared-memory queue sleep on its notification instead of yielding a core for a second.

    Right after a message the reader still looks every 50 microseconds. A notification can be lost (its socket keeps
    one), hence the bound on the sleep, which is all that a lost one costs.
    """
    condition = shm_broadcast.SpinCondition
    if getattr(condition, "kvbus_naps", False) or os.environ.get("KVBUS_SPIN"):
        return
    stock_wait = condition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        idle_s = time.monotonic() - self.last_read
        if idle_s > self.busy_loop_s:
            stock_wait(self, timeout_ms)
        elif idle_s < LOOK_FOR_S:
            time.sleep(LOOK_EVERY_S)
        elif self.local_notify_socket in dict(self.poller.poll(timeout=NAP_MAX_MS)):
            self.local_notify_socket.recv(flags=zmq.NOBLOCK, copy=False)

    condition.wait = wait
    condition.kvbus_naps = True
