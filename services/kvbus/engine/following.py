"""From vLLM's scheduler output to what the ranks must know: how far each producer request gets in this step."""

from collections.abc import Sequence
from typing import Any

from kvbus.engine.facts import Progress, StepOrders, blocks_for
from kvbus.engine.producer import ProducerCore


class Follower:
    """Follows the producer requests of one engine."""

    def __init__(self, producer: ProducerCore) -> None:
        self.producer = producer
        self._told: dict[str, int] = {}
        self._cached: dict[str, int] = {}

    def follow(self, output: Any, orders: StepOrders) -> None:
        """Add this step's progress and preemptions to its orders."""
        for new in output.scheduled_new_reqs:
            self._cached.setdefault(new.req_id, new.num_computed_tokens)
            self._advance(output, new.req_id, new.block_ids, new.num_computed_tokens, orders, restarted=False)
        again = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True
        ):
            restarted = request_id in again.resumed_req_ids
            self._advance(output, request_id, block_ids, computed, orders, restarted=restarted)
        for request_id in output.preempted_req_ids or ():
            transfer_id = self.producer.transfer_of(request_id)
            if transfer_id is not None:
                orders.preempted.append(transfer_id)

    def cached_tokens(self, request_id: str) -> int:
        """Tokens that were there when the request was first scheduled. Asked once, at its end."""
        return self._cached.pop(request_id, 0)

    def forget(self, transfer_id: str) -> None:
        self._told.pop(transfer_id, None)

    def _advance(
        self,
        output: Any,
        request_id: str,
        block_ids: Sequence[Sequence[int]] | None,
        computed: int,
        orders: StepOrders,
        *,
        restarted: bool,
    ) -> None:
        transfer_id = self.producer.transfer_of(request_id)
        if transfer_id is None:
            return
        tokens, size = self.producer.open[transfer_id].terms.token_count, self.producer.block_size
        done = computed + output.num_scheduled_tokens[request_id]
        final = done >= tokens
        new = tuple(block_ids[0]) if block_ids else ()
        first = 0 if restarted else self._told.get(transfer_id, 0)
        self._told[transfer_id] = first + len(new)
        ready = blocks_for(tokens, size) if final else done // size
        orders.progress.append(Progress(transfer_id, request_id, new, first, ready, final, restarted))
