"""Stock bidirectional pull as `kvbus bench multiturn` runs it: `bench/stock.py`, and what decode gives out for the next
turn is written down (see `multiturn_params`)."""

from typing import Any

from kvbus.bench import stock
from kvbus.bench.multiturn_params import give_out


class NixlPullConnector(stock.NixlPullConnector):
    """Stock pull with `bidirectional_kv_xfer`."""

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        result = super().request_finished(request, block_ids)
        give_out(request.request_id, result[1])
        return result

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        result = super().request_finished_all_groups(request, block_ids)
        give_out(request.request_id, result[1])
        return result
