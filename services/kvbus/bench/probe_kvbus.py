"""kvbus's connector with the same probes as the stock ones, for `kvbus bench handoff`."""

from typing import Any

from kvbus.bench.probe import Probed, note_calls
from kvbus.engine import connector
from kvbus_schemas import PushOrdered


class KvbusConnector(Probed, connector.KvbusConnector):
    """Notes also when an order reaches the rank's thread and when it posts WRITEs."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        posting = ("write", "posted")
        note_calls(self.recorder, self._plane.worker, "_xfer_blocks", posting, key="remote_request_id")
        super().register_kv_caches(kv_caches)
        assert self._rank_side is not None
        writing = self._rank_side.writing
        receive = writing.receive

        def noted(message: Any, now_s: float) -> Any:
            if isinstance(message, PushOrdered):
                self.recorder.note("ordered", message.transfer_id)
            return receive(message, now_s)

        writing.receive = noted  # type: ignore[method-assign]
