"""A light engine's KV memory, and who holds which block of it.

A block's KV is the tokens that it stands for. `KvMemory` is touched by the engine's thread, and by those of the data
plane for blocks that are lent to a transfer; `BlockPool` belongs to the engine's thread.
"""

from collections.abc import Iterable
from hashlib import blake2b

from kvbus.engine.cache_events import CacheEvent
from kvbus.light.language import TOKEN_BYTES, packed

NOTHING = b"\xff" * TOKEN_BYTES
"""A slot that holds no KV."""


class KvMemory:
    """`blocks` blocks of `block_size` tokens."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self._cells = bytearray(NOTHING * (blocks * block_size))

    def get(self, block: int) -> bytes:
        """What one block holds."""
        return bytes(self._cells[block * self.block_bytes : (block + 1) * self.block_bytes])

    def put(self, block: int, content: bytes) -> None:
        """Replace what one block holds. Raises ValueError on what does not fit."""
        if not 0 <= block < self.blocks or len(content) != self.block_bytes:
            raise ValueError(f"{len(content)} bytes do not fit into block {block}")
        self._cells[block * self.block_bytes : (block + 1) * self.block_bytes] = content

    def wipe(self, blocks: list[int]) -> None:
        """These blocks hold nothing from now on."""
        for block in blocks:
            self.put(block, NOTHING * self.block_size)

    def write(self, table: list[int], start: int, tokens: list[int]) -> None:
        """Store the KV of `tokens`, the first of which is at position `start` of a request with block `table`."""
        content, position, end = packed(tokens), start, start + len(tokens)
        while position < end:
            slot = position % self.block_size
            count = min(self.block_size - slot, end - position)
            at = (table[position // self.block_size] * self.block_size + slot) * TOKEN_BYTES
            done = (position - start) * TOKEN_BYTES
            self._cells[at : at + count * TOKEN_BYTES] = content[done : done + count * TOKEN_BYTES]
            position += count

    def read(self, table: list[int], count: int) -> bytes:
        """The KV of the first `count` tokens of a request with block `table`."""
        used = -(-count // self.block_size)
        return b"".join(map(self.get, table[:used]))[: count * TOKEN_BYTES]


class BlockPool:
    """Blocks by reference count; a free block keeps its name, and so its KV, until it is taken again.

    What the connector's side uses as well is named as in vLLM's block pool, with a block's id for the block.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = range(blocks)
        self._free: dict[int, None] = dict.fromkeys(range(blocks))
        self._holders = [0] * blocks
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.events: list[CacheEvent] | None = None
        """What has happened to the cache, if somebody wants to know; emptied by whoever reads it."""

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many blocks for one holder, least recently used first; None when there are too few."""
        if count > len(self._free):
            return None
        taken = [block for block, _ in zip(self._free, range(count), strict=False)]
        for block in taken:
            del self._free[block]
            self._holders[block] = 1
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._block_of[name]
                if self.events is not None:
                    self.events.append(CacheEvent("removed", (name,)))
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """One holder less of each; who comes first here is taken again first."""
        for block in blocks:
            assert self._holders[block] > 0, block
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def name(self, block: int, name: bytes, before: bytes | None = None) -> None:
        """The block is full and final: whoever has the same tokens may share it. `before` names the one before it."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name], self._name_of[block] = block, name
            if self.events is not None:
                self.events.append(CacheEvent("stored", (name,), before))

    def forget_names(self) -> bool:
        """Nobody finds anything any more; False, and nothing is done, while somebody holds a block."""
        if any(self._holders):
            return False
        self._name_of.clear()
        self._block_of.clear()
        if self.events is not None:
            self.events.append(CacheEvent("cleared"))
        return True

    def take_events(self) -> list[CacheEvent]:
        """What has happened since the last call."""
        if not self.events:
            return []
        events, self.events = self.events, []
        return events

    def find(self, names: list[bytes]) -> list[int]:
        """The blocks of the longest known beginning."""
        found = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found


def block_name(before: bytes, tokens: list[int]) -> bytes:
    """Name of a full block: its tokens and, by the name of the block before it, all tokens before them."""
    return blake2b(packed(tokens), digest_size=16, key=before).digest()
