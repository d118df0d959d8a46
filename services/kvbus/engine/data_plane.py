"""The stock NIXL data plane behind `rank.DataPlane`: regions, descriptors and tensor parallel mapping are vLLM's.

What is replaced: the handshake reads the peer's card instead of asking over a side channel, and the worker's own
matching, notifications and time-outs are never called.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from kvbus.engine.facts import landing_note
from kvbus.engine.vllm_parts import agent_metadata_of
from kvbus.engine.writing import Write
from kvbus.errors import EngineError
from kvbus_schemas import EngineCard

log = structlog.get_logger()


class _Worker(NixlPushConnectorWorker):  # type: ignore[misc]  # vLLM is not type-checked here
    """The stock worker without its writer thread, and with handshakes from cards."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cards: dict[str, EngineCard] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)
        if self._mixed_mem_types:
            raise EngineError("kvbus moves KV caches of one memory type; this model mixes host and device memory")

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *_: Any, **__: Any
    ) -> tuple[dict[tuple[int, int], str], float]:
        """Load the agents of the peer's ranks that this rank writes to. (host and port are not used.)"""
        card = self.cards[expected_engine_id]
        agents: dict[tuple[int, int], str] = {}
        for tp_rank in self.transfer_topo.handshake_target_ranks(remote_tp_size, 1):
            payload = card.agent_metadata.get(f"0.{tp_rank}")
            if payload is None:
                raise EngineError(f"the card of {card.engine_id} has no NIXL metadata for rank {tp_rank}")
            metadata: NixlAgentMetadata = agent_metadata_of(payload, self.compat_hash, card.engine_id)
            self._validate_remote_parallel_config(metadata)
            agents[(0, tp_rank)] = self.add_remote_agent(metadata, tp_rank, remote_tp_size, 1)
        return agents, 0.0


class StockDataPlane:
    """Implements `rank.DataPlane`. NIXL calls come from the rank's thread; handshakes from the stock executor."""

    def __init__(self, vllm_config: Any, nixl_id: str, kv_cache_config: Any) -> None:
        self.worker = _Worker(vllm_config, nixl_id, kv_cache_config)
        self.rank: int = self.worker.tp_rank
        self.block_bytes = 0
        self.on_cpu: bool = self.worker.device_type == "cpu"
        self._handshakes = threading.Lock()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register_kv_caches(kv_caches)
        ratio = self.worker._physical_blocks_per_logical_kv_block  # noqa: SLF001
        self.block_bytes = sum(self.worker.block_len_per_layer) * ratio

    def device_event(self) -> Any:
        """An event after which all that was launched until now is computed; None where launching is computing."""
        if self.on_cpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def connect(self, card: EngineCard, done: Callable[[str], None]) -> None:
        nixl_id = _nixl_id(card.engine_id, card.incarnation)
        if card.block_size != self.worker.block_size:
            done(f"block size {card.block_size} there, {self.worker.block_size} here: start both with the same")
            return
        self.worker.cards[nixl_id] = card
        pending: Future[Any] | None = self.worker._ensure_handshake(nixl_id, "", 0, card.tp_size)  # noqa: SLF001
        if pending is None:
            done("")
            return
        pending.add_done_callback(lambda future: done(str(future.exception() or "")))

    def connected(self, engine_id: str, incarnation: str) -> bool:
        return _nixl_id(engine_id, incarnation) in self.worker._remote_agents  # noqa: SLF001

    def disconnect(self, engine_id: str, incarnation: str) -> None:
        nixl_id = _nixl_id(engine_id, incarnation)
        self.worker.cards.pop(nixl_id, None)
        if self.connected(engine_id, incarnation):
            self.worker._cleanup_remote_engine(nixl_id)  # noqa: SLF001

    def submit(self, write: Write, ready: Any) -> list[int]:
        if ready is not None:
            ready.synchronize()
        worker, write_id = self.worker, write.write_id
        local = (list(write.source_blocks),)
        meta = ReqMeta(
            local_block_ids=local,
            local_physical_block_ids=worker._logical_to_kernel_block_ids(  # noqa: SLF001
                local,
                worker._physical_blocks_per_logical_kv_block,  # noqa: SLF001
            ),
            tp_size=worker.world_size,
            remote=RemoteMeta(
                block_ids=(list(write.target_blocks),),
                host="",
                port=0,
                engine_id=_nixl_id(write.consumer_id, write.consumer_incarnation),
                request_id=landing_note(write.transfer_id, self.rank, write.first, len(write.source_blocks)),
            ),
        )
        worker._xfer_blocks_for_req(write_id, meta)  # noqa: SLF001
        handles: list[int] = worker._sending_transfers.pop(write_id, [])  # noqa: SLF001
        if write_id in worker._send_failures:  # noqa: SLF001
            worker._send_failures.discard(write_id)  # noqa: SLF001
            if not self.abort(handles):
                log.error("write_handle_stuck", write_id=write_id)
            raise EngineError("NIXL refused the WRITE; the engine's log has its reason")
        return handles

    def poll(self, handles: list[int]) -> str:
        failed = False
        for handle in list(handles):
            state = self.worker.nixl_wrapper.check_xfer_state(handle)
            if state == "PROC":
                continue
            failed |= state != "DONE"
            self.worker.nixl_wrapper.release_xfer_handle(handle)
            handles.remove(handle)
        if failed:
            return "failed" if self.abort(handles) else "pending"
        return "pending" if handles else "done"

    def abort(self, handles: list[int]) -> bool:
        for handle in list(handles):
            try:
                self.worker.nixl_wrapper.release_xfer_handle(handle)
            except Exception as error:
                log.warning("write_not_aborted", error=repr(error))
                return False
            handles.remove(handle)
        return True

    def notes(self) -> list[bytes]:
        return [note for notes in self.worker.nixl_wrapper.get_new_notifs().values() for note in notes]


def _nixl_id(engine_id: str, incarnation: str) -> str:
    return f"{engine_id}.{incarnation}"
