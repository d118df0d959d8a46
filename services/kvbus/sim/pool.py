"""vLLM's block pool, as far as the connector keeps a conversation's blocks with it: references of no request."""

from collections.abc import Iterable

from kvbus.engine.facts import blocks_for
from kvbus.engine.reuse_side import ReuseSide
from kvbus.sim.memory import Memory


class Keeper:
    """Owns what is kept."""

    request_id = "kept"
    transfer_id = awaits = ""
    parked = False


class Pool:
    """A block is its number here."""

    def __init__(self, memory: Memory, side: ReuseSide) -> None:
        self.blocks = range(len(memory.blocks))
        self._memory, self._side = memory, side
        self._keeper = Keeper()
        memory.lends_kept = self._lends
        side.pool = self

    def touch(self, block_ids: list[int]) -> None:
        self._memory.touch(self._keeper, block_ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        self._memory.release(self._keeper, list(block_ids)[::-1])

    def get_num_free_blocks(self) -> int:
        return len(self._memory.free)

    def _lends(self, block_id: int, transfer_id: str) -> bool:
        """Whether this block is kept for an offer that this transfer takes."""
        held = self._side.retention.offers.get(self._side.retention.serving.get(transfer_id, ""))
        if held is None or self._keeper not in self._memory.blocks[block_id].owners:
            return False
        return block_id in held.block_ids[: blocks_for(held.token_count, self._memory.block_size)]
