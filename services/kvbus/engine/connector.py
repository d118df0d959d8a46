"""The connector that vLLM loads: stock NIXL data plane, coordination over the bus.

The only module (with `vllm_parts`) that imports vllm. It translates: vLLM's hooks to `SchedulerSide` and
`RankSide`, their wishes to the stock data plane. Load it with

    --kv-transfer-config '{"kv_connector": "KvbusConnector", "kv_connector_module_path": "kvbus.engine.connector",
      "kv_role": "kv_producer", "engine_id": "prefill-0", "kv_load_failure_policy": "recompute", ...}'
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

from kvbus.engine import vllm_parts
from kvbus.engine.cache_tap import CacheTap
from kvbus.engine.counting import Counting, look_at_link, look_at_scheduler
from kvbus.engine.data_plane import StockDataPlane
from kvbus.engine.facts import StepOrders
from kvbus.engine.handle import EngineHandle, unpin_threads
from kvbus.engine.identity import Identity
from kvbus.engine.landing import LandingCore
from kvbus.engine.link import Link, LinkHandlers
from kvbus.engine.nudge import Ear, Nudge
from kvbus.engine.own_matcher import OwnMatcher
from kvbus.engine.rank import RankSide
from kvbus.engine.scheduler import SchedulerSide
from kvbus.engine.settings import EngineSettings, engine_settings
from kvbus.engine.stats import KvbusPromMetrics, KvbusStats, Reporter
from kvbus.engine.writing import WritingCore
from kvbus_schemas import EngineCard, LoadReported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvbusMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not type-checked here
    """What one step carries from the scheduler to every rank."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class QuietRanks(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not type-checked here
    """What ranks tell the scheduler: for each transfer of a kept conversation, how many ranks are done with it."""

    def __init__(self, transfers: Counter[str]) -> None:
        self.transfers = transfers

    def aggregate(self, other: "QuietRanks") -> "QuietRanks":
        return QuietRanks(self.transfers + other.transfers)


class KvbusConnector(NixlBaseConnector):  # type: ignore[misc]  # vLLM is not type-checked here
    """vLLM's KV connector for kvbus; one object in the scheduler's process, one in each rank's."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        vllm_parts.check_supported(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self._settings = engine_settings(extra)
        self._identity = vllm_parts.identity_of(vllm_config, kv_cache_config, self._settings)
        self._scheduler_side: SchedulerSide | None = None
        self._rank_side: RankSide | None = None
        self._agents: dict[str, bytes] = {}
        self._unpinned = False
        self._cache_tap = CacheTap()
        self._counting = Counting(self._identity.role)
        self._reporter = Reporter(self._counting.tally)
        if role == KVConnectorRole.SCHEDULER:
            self._link = _link(self._identity, self._settings, name=self._identity.engine_id)
            if self._settings.matcher == "engine" and self._identity.role == "prefill":
                self._link.own_matcher = OwnMatcher(self._identity.engine_id)
            handle = EngineHandle(vllm_parts.WAKEUP)
            self._scheduler_side = SchedulerSide(self._identity, self._settings, self._link, handle)
            self._ear = Ear(self._identity.nixl_id, handle.notify)
        else:
            vllm_parts.quiet_nixl(self._settings.nixl_progress_delay_us)
            vllm_parts.nap_between_messages()
            self._plane = StockDataPlane(vllm_config, self._identity.nixl_id, kv_cache_config)
            self.connector_worker = self._plane.worker
            self._link = _link(self._identity, self._settings, name=f"{self._identity.engine_id}-r{self._plane.rank}")

        self._link.said = self._counting.said

    # The scheduler's process.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The ranks have registered their memory: the engine can announce itself."""
        assert self._scheduler_side is not None
        vllm_parts.nap_between_messages()
        payloads = vllm_parts.handshake_payloads(metadata)
        self._identity.compat_hash, self._agents = payloads.compat_hash, payloads.agents
        side = self._scheduler_side
        self._link.start(
            LinkHandlers(
                hear=side.hear,
                seen=side.seen,
                gone=side.engine_gone,
                card=self._card,
                load=self._load,
                keep_time=self._keep_time,
            )
        )

    def on_new_request(self, request: "Request") -> None:
        assert self._scheduler_side is not None
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler_side is not None
        return self._scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self._scheduler_side is not None
        self._scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler_side is not None
        return KvbusMetadata(self._scheduler_side.build(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler_side is not None
        output = connector_output
        self._scheduler_side.took(output.finished_recving, output.finished_sending, output.failed_recving)
        if isinstance(connector_output.kv_connector_worker_meta, QuietRanks):
            self._scheduler_side.reuse.quiet(connector_output.kv_connector_worker_meta.transfers)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler_side is not None
        hold = self._scheduler_side.finished(request, block_ids)
        params = self._scheduler_side.reply_of(request)
        self._counting.replied(params)
        return hold, params

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        assert self._scheduler_side is not None
        side = self._scheduler_side
        side.reuse.pool = kv_cache_manager.block_pool
        if kv_cache_manager.enable_caching and side.cache.begin():
            self._cache_tap = CacheTap(kv_cache_manager, side.cache.take)

    def has_pending_push_work(self) -> bool:
        side = self._scheduler_side
        return side is not None and (side.has_news() or self._cache_tap.waiting or self._reporter.overdue())

    def _keep_time(self) -> None:
        assert self._scheduler_side is not None
        self._scheduler_side.keep_time()
        if self._reporter.overdue() or self._cache_tap.waiting:  # a cache that was cleared while nothing runs
            self._scheduler_side.handle.wake_idle()

    def _card(self) -> EngineCard | None:
        if not self._agents:
            return None
        return self._identity.card(
            http_url=self._settings.http_url,
            progressive=self._settings.progressive,
            own_matcher=self._link.own_matcher is not None,
            agent_metadata=self._agents,
            cache_events=self._scheduler_side is not None and self._scheduler_side.cache.on,
        )

    def _load(self) -> LoadReported | None:
        assert self._scheduler_side is not None
        side = self._scheduler_side
        return vllm_parts.load_of(side.handle.scheduler, self._identity, side.reuse.retention.blocks)

    # A rank's process.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._plane.register_kv_caches(kv_caches)
        me = self._identity
        writing = WritingCore(
            me.engine_id,
            self._plane.rank,
            me.tp_size,
            me.block_size,
            self._plane.block_bytes,
            progressive=self._settings.progressive,
        )
        self._rank_side = RankSide(self._plane, writing, LandingCore(self._plane.rank, me.tp_size), self._link)
        self._rank_side.nudge = Nudge(self._identity.nixl_id)
        self._rank_side.start()
        side = self._rank_side
        self._link.start(LinkHandlers(hear=side.hear, seen=self._meet, gone=side.gone))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._plane.worker.xfer_handshake_metadata

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._rank_side is not None and isinstance(kv_connector_metadata, KvbusMetadata)
        self._rank_side.before_forward(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """After the forward pass (on a GPU: after its launch): hand the step's orders to the rank's thread."""
        assert self._rank_side is not None
        if not self._unpinned and self._plane.on_cpu:
            self._unpinned = True
            unpin_threads()
        self._rank_side.step(self._orders(), self._plane.device_event())

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._rank_side is not None
        sent, received, failed = self._rank_side.results(self._orders())
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> "QuietRanks | None":
        assert self._rank_side is not None
        quiet = self._rank_side.take_quiet()
        return QuietRanks(quiet) if quiet else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    # Metrics, in both.

    def get_kv_connector_stats(self) -> KvbusStats | None:
        if self._scheduler_side is not None:
            look_at_scheduler(self._counting.tally, self._identity, self._link, self._scheduler_side)
        else:
            look_at_link(self._counting.tally, self._link)
        return self._reporter.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbusStats:
        return KvbusStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> KvbusPromMetrics:
        return KvbusPromMetrics(*given)

    def shutdown(self) -> None:
        self._link.stop()
        if self._scheduler_side is not None:
            self._ear.close()
        if self._rank_side is not None:
            self._rank_side.stop()
            self._plane.worker.shutdown()

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvbusMetadata)
        return metadata.orders

    def _meet(self, card: EngineCard) -> None:
        """Hand-offs go between prefill and decode, in either direction; equals have nothing to say to each other."""
        assert self._rank_side is not None
        if card.role != self._identity.role:
            self._rank_side.seen(card)


def _link(identity: Identity, settings: EngineSettings, name: str) -> Link:
    return Link(settings, name=name, engine_id=identity.engine_id, incarnation=identity.incarnation)
