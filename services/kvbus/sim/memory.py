"""An engine's KV memory as content: whose each block is, which tokens its KV stands for, who reads and writes it.

A block has one cell per head shard (two, the largest tensor parallel size here). A cell holds the tokens that its
KV was computed from, up to the last filled slot of the block, so that any misplaced KV is seen, not guessed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvbus.sim.world import World

if TYPE_CHECKING:
    from kvbus.sim.plane import NicWrite

SHARDS = 2
Tokens = tuple[int, ...]


def shards_of(rank: int, tp_size: int) -> tuple[int, ...]:
    """The head shards that one rank holds."""
    share = SHARDS // tp_size
    return tuple(range(rank * share, (rank + 1) * share))


class Block:
    __slots__ = ("cells", "incoming", "key", "lent", "owners", "readers")

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.lent: list[Any] = []
        """Requests that were preempted and whose WRITEs may read it until the next forward pass."""
        """The request that it was taken from by preemption, until the next forward pass begins."""
        self.cells: list[Tokens | None] = [None] * SHARDS
        self.key: Tokens | None = None
        self.readers: list[NicWrite] = []
        self.incoming: list[NicWrite] = []


class Memory:
    """The blocks of one incarnation of an engine."""

    def __init__(self, world: World, name: str, num_blocks: int, block_size: int) -> None:
        self.world, self.name = world, name
        self.block_size = block_size
        self.alive = True
        self.strict = True
        """Every touch of a block that is not held is a fault, not only what it leads to."""
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = list(range(num_blocks))
        self.lent: list[int] = []
        self.caching = True
        self.lends_kept: Callable[[int, str], bool] = lambda block_id, transfer_id: False
        """Whether a block that no request owns is there for this transfer."""
        self._lifo = world.rng.random() < 0.5
        self._cached: dict[Tokens, int] = {}

    def hits(self, tokens: Tokens) -> list[int]:
        """Blocks that hold the beginning of these tokens already, leaving at least one token to compute."""
        found: list[int] = []
        if not self.caching:
            return found
        for end in range(self.block_size, len(tokens), self.block_size):
            block_id = self._cached.get(tokens[:end])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def room_for(self, count: int, hits: list[int]) -> bool:
        """Whether so many new blocks can be had besides the hits."""
        blocks = self.blocks
        return count <= len(self.free) - sum(not blocks[block_id].owners for block_id in hits)

    def touch(self, request: Any, block_ids: list[int]) -> None:
        """A request shares blocks that are filled already."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if not block.owners:
                self.free.remove(block_id)
            block.owners.append(request)

    def allocate(self, request: Any, count: int) -> list[int]:
        """So many blocks for one request alone; there must be room."""
        taken = []
        for _ in range(count):
            block_id = self.free.pop() if self._lifo else self.free.pop(0)
            block = self.blocks[block_id]
            if block.key is not None:
                if self._cached.get(block.key) == block_id:
                    del self._cached[block.key]
                block.key = None
            block.owners = [request]
            taken.append(block_id)
        return taken

    def cache(self, request: Any, block_ids: list[int], tokens: Tokens, end: int) -> None:
        """The request's full blocks among its first `end` tokens can be shared from now on."""
        for index in range(end // self.block_size):
            block = self.blocks[block_ids[index]]
            if block.key is None and block.owners == [request]:
                block.key = tokens[: (index + 1) * self.block_size]
                self._cached.setdefault(block.key, block_ids[index])

    def release(self, request: Any, block_ids: list[int], *, preempted: bool = False) -> None:
        """The request gives its blocks back."""
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            block.owners.remove(request)
            if preempted:
                block.lent.append(request)
                self.lent.append(block_id)
            if block.owners:
                continue
            self.free.append(block_id)
            if block.readers and not preempted:
                self._violate(request, f"block {block_id} was freed while a WRITE reads it", "1 source")
            for nic in block.incoming:
                if nic.may_land():
                    self._violate(request, f"block {block_id} was freed while a WRITE may still land in it", "1")

    def forward_begins(self) -> None:
        """Blocks that preemption took can be overwritten from now on."""
        for block_id in self.lent:
            block = self.blocks[block_id]
            requests, block.lent = block.lent, []
            for request in requests:
                reads = any(nic.write.transfer_id == request.transfer_id for nic in block.readers)
                if reads and not self.lends_to(block_id, request.transfer_id):
                    self._violate(request, f"preempted block {block_id} is reused while a WRITE reads it", "1 source")
        self.lent = []

    def lends_to(self, block_id: int, transfer_id: str) -> bool:
        """Whether a WRITE of this transfer may read the block now."""
        block = self.blocks[block_id]
        if any(request.transfer_id == transfer_id for request in block.lent):
            return True
        return any(owner.transfer_id == transfer_id for owner in block.owners) or self.lends_kept(block_id, transfer_id)

    def compute(self, request: Any, shards: tuple[int, ...], start: int, end: int) -> None:
        """A forward pass: read all before `start`, fill the slots from `start` to `end`."""
        self.verify(request, shards, start)
        size, tokens = self.block_size, request.tokens
        for index in range(start // size, -(-end // size)):
            block = self.blocks[request.block_ids[index]]
            content = tokens[: min(end, (index + 1) * size)]
            for shard in shards:
                before = block.cells[shard] or ()
                read = block.readers and any(shard in nic.shards for nic in block.readers)
                if read and before[: len(content)] != content[: len(before)]:
                    self._violate(
                        request, f"block {request.block_ids[index]} is overwritten while it is read", "1 source"
                    )
                block.cells[shard] = content

    def verify(self, request: Any, shards: tuple[int, ...], count: int) -> None:
        """Attention over the first `count` tokens reads the request's own KV and nothing else."""
        size, tokens = self.block_size, request.tokens
        for index in range(-(-count // size)):
            expected = tokens[: min(count, (index + 1) * size)]
            cells = self.blocks[request.block_ids[index]].cells
            for shard in shards:
                cell = cells[shard]
                if cell is None or cell[: len(expected)] != expected:
                    text = f"block {request.block_ids[index]} (position {index}) holds {cell}, expected {expected}"
                    self._violate(request, text, "wrong tokens")
                    return

    def _violate(self, request: Any, text: str, rule: str) -> None:
        if not self.strict and rule != "wrong tokens":
            return
        self.world.violate(rule, request.transfer_id, f"{self.name}, request {request.request_id}: {text}")
