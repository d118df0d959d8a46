"""vLLM's KV events at their source: the events that the KV cache manager gives out at the end of each step.

Switching them on in the block pool is enough; no publisher, socket or thread of vLLM's is involved, and somebody's own
`--kv-events-config` goes on as before. The tap is in place before the first block is cached, so nothing is missed.
vLLM's objects are used as they come; vLLM itself is not imported. Where hashes come as numbers all the same, a block
that leaves counts as gone although a twin of it may be left: the index then knows a little less than there is.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from kvbus.engine.cache_events import CacheEvent

GROUP = (0).to_bytes(4, "big")
"""kvbus serves models with one KV cache group; vLLM appends the group's number to a hash to find a block by it."""

NUMBERS = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
"""vLLM's default is to tell hashes as numbers of 64 bits, by which no block can be looked up."""

Take = Callable[[Sequence[CacheEvent]], None]


class CacheTap:
    """`take` gets the events of each step, on the engine's thread. Without a manager nothing ever comes."""

    def __init__(self, manager: Any = None, take: Take | None = None) -> None:
        self._pool: Any = None
        self._take = take
        if manager is not None:
            self._pool = manager.block_pool
            if not self._pool.enable_kv_cache_events:  # else somebody listens who may count on numbers
                os.environ.setdefault(NUMBERS, "0")
            self._pool.enable_kv_cache_events = True
            self._stock = manager.take_events
            manager.take_events = self._taken

    @property
    def waiting(self) -> bool:
        """Whether events wait for a step. From any thread."""
        return self._pool is not None and bool(self._pool.kv_event_queue)

    def _taken(self) -> Any:
        events = self._stock()
        if events and self._take is not None:
            self._take([found for event in events if (found := self._event(event)) is not None])
        return events

    def _event(self, event: Any) -> CacheEvent | None:
        match type(event).__name__:
            case "BlockStored":
                return CacheEvent("stored", event.block_hashes, event.parent_block_hash)
            case "BlockRemoved":
                gone = [found for found in event.block_hashes if not self._still_there(found)]
                return CacheEvent("removed", gone) if gone else None
            case "AllBlocksCleared":
                return CacheEvent("cleared")
            case _:
                return None

    def _still_there(self, of_engine: bytes | int) -> bool:
        """Two requests that computed the same at once have two blocks of one hash; vLLM tells of the first to go."""
        if isinstance(of_engine, int) or self._pool is None:
            return False
        return self._pool.cached_block_hash_to_block.get_one_block(of_engine + GROUP) is not None
