"""vLLM's own NIXL connectors with probes, for `kvbus bench handoff`.

They keep vLLM's class names, since vLLM looks at those. Two things are changed, because without them this machine
measures something else: NIXL's progress thread pauses instead of spinning on a core of its own, and the CPU worker's
threads may run on every core instead of sharing the last one with the other engine's.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl

from kvbus.bench.probe import Probed, note_calls
from kvbus.engine.handle import unpin_threads
from kvbus.engine.settings import EngineSettings
from kvbus.engine.vllm_parts import quiet_nixl


class _Stock(Probed):
    connector_worker: Any
    _transfer_method: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        quiet_nixl(EngineSettings().nixl_progress_delay_us)
        super().__init__(*args, **kwargs)
        self._unpinned = False
        if self.connector_worker is not None:
            posting = ("write", "posted")
            note_calls(self.recorder, self.connector_worker, self._transfer_method, posting, key="remote_request_id")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._unpinned:
            self._unpinned = True
            unpin_threads()
        super().start_load_kv(forward_context, **kwargs)


class NixlPullConnector(_Stock, nixl.NixlPullConnector):  # type: ignore[misc]  # vLLM is not type-checked here
    """Stock pull: decode READs what prefill has finished."""

    _transfer_method = "_read_blocks"


class NixlPushConnector(_Stock, nixl.NixlPushConnector):  # type: ignore[misc]  # vLLM is not type-checked here
    """Stock push: decode registers its blocks by NIXL notification, prefill WRITEs at the end."""

    _transfer_method = "_xfer_blocks"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            note_calls(self.recorder, self.connector_worker, "_handle_push_reg_notif", ("ordered", ""))
