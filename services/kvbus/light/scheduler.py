"""A model of vLLM's scheduler: continuous batching, chunked prompts, prefix cache, preemption, parked requests.

    WAITING ──room──► RUNNING ──end──► FINISHED ──(held until reported as sent)──► gone
       │ ▲               │ no block left: PREEMPTED, back to the head of the queue
       │ └─ landed, or failed (then it is computed here)
       └─push expected──► WAITING_FOR_REMOTE_KVS

It calls `SchedulerSide` where vLLM calls a connector, in the same order: a step either preempts or admits, never both;
blocks of a request that was aborted while parked come back when the ranks report it. No clock, no I/O.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvbus.engine.facts import blocks_for
from kvbus.engine.scheduler import SchedulerSide
from kvbus.light.language import EOS
from kvbus.light.memory import BlockPool, KvMemory
from kvbus.light.request import FINISH_REASONS, Delta, Request, Status


@dataclass(frozen=True, slots=True)
class NewRequest:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequests:
    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Step:
    """One step, under the names of vLLM's scheduler output."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0


class _Admitted(Enum):
    YES = auto()
    LATER = auto()
    """Another request takes the push that this one would also need."""
    NO_ROOM = auto()


class Scheduler:
    """All requests of one engine."""

    def __init__(self, side: SchedulerSide, memory: KvMemory, *, max_seqs: int, max_batched_tokens: int) -> None:
        self.side, self.memory = side, memory
        self.block_size = memory.block_size
        self.pool = side.reuse.pool = BlockPool(memory.blocks)
        self.max_num_running_reqs, self.max_batched_tokens = max_seqs, max_batched_tokens
        self.requests: dict[str, Request] = {}
        """Every request that holds blocks or wants to, also after its end."""
        self.replied: Callable[[dict[str, Any] | None], None] = lambda _params: None
        """Called with what each reply tells the router."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.parked: dict[str, Request] = {}
        self.counters = Counters()
        self._left = 0

    def add(self, request: Request) -> None:
        """A new request."""
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.counters.prompt_tokens += request.num_prompt_tokens
        request.block_hashes = request.names(request.num_prompt_tokens // self.block_size, self.block_size)
        self.side.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """Nobody wants the answer any more."""
        request = self.requests.get(request_id)
        if request is not None and not request.status.finished:
            self._finish(request, Status.FINISHED_ABORTED)

    def schedule(self) -> Step:
        """Choose what the next step computes, and allocate its blocks."""
        step = Step()
        self._left = self.max_batched_tokens
        for request in list(self.running):
            if self._left > 0 and request.status is Status.RUNNING:
                self._go_on(step, request)
        if not step.preempted_req_ids:
            self._admit_waiting(step)
        return step

    def update(self, step: Step, sampled: dict[str, int], sent: set[str], received: set[str], failed: set[str]) -> None:
        """The step is computed: `sampled` has the new tokens, the sets are what the ranks report."""
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            self._name_blocks(request)
            if request_id in sampled:
                self._append(request, sampled[request_id])
        self.side.took(received, sent)
        for request_id in received:
            self._received(self.requests[request_id], failed=request_id in failed)
        for request_id in sent:
            self._forget(self.requests[request_id])
        self.side.cache.take(self.pool.take_events())

    def reset_prefix_cache(self) -> None:
        """Forget what is cached, if no request holds any of it."""
        if self.pool.forget_names():
            self.side.cache.take(self.pool.take_events())

    def tokens_in_flight(self) -> int:
        """Prompt and output tokens of all unfinished requests."""
        return sum(r.num_tokens for r in list(self.requests.values()) if not r.status.finished)

    # A step's choice.

    def _go_on(self, step: Step, request: Request) -> None:
        count = min(request.num_tokens - request.num_computed_tokens, self._left)
        new = self._grow(step, request, request.num_computed_tokens + count)
        if new is not None:
            self._add_cached(step, request, new)
            self._count(step, request, count)

    def _grow(self, step: Step, request: Request, tokens: int) -> list[int] | None:
        """Blocks for the first `tokens` tokens; whoever came last makes room. None: it was the request itself."""
        while (blocks := self.pool.take(self._missing(request, tokens))) is None:
            victim = self.running.pop()
            self._preempt(step, victim)
            if victim is request:
                return None
        request.block_ids += blocks
        return blocks

    def _missing(self, request: Request, tokens: int) -> int:
        return max(blocks_for(tokens, self.block_size) - len(request.block_ids), 0)

    def _preempt(self, step: Step, victim: Request) -> None:
        self.counters.preemptions += 1
        step.preempted_req_ids.add(victim.request_id)
        self._release(victim)
        victim.status = Status.PREEMPTED
        self.waiting.appendleft(victim)

    def _admit_waiting(self, step: Step) -> None:
        later: list[Request] = []
        while self.waiting and self._left > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.popleft()
            admitted = self._admit(step, request)
            if admitted is _Admitted.NO_ROOM:
                self.waiting.appendleft(request)
                break
            if admitted is _Admitted.LATER:
                later.append(request)
        self.waiting.extendleft(reversed(later))

    def _admit(self, step: Step, request: Request) -> _Admitted:
        hits: list[int] = []
        computed, external, parks = request.num_computed_tokens, 0, False
        if computed == 0:
            hits = self._hits(request)
            computed = len(hits) * self.block_size
            matched, parks = self.side.matched_tokens(request, computed)
            if matched is None:
                return _Admitted.LATER
            external = matched
        count = 0 if parks else min(request.num_tokens - computed - external, self._left)
        if not self._allocate(request, hits, computed + external + count):
            return _Admitted.NO_ROOM
        if parks:
            self.memory.wipe(request.block_ids[len(hits) :])
        self.side.allocated(request, (list(request.block_ids),), external)
        if parks:
            self._park(request, computed + external)
        else:
            self._start(step, request, computed, count)
        return _Admitted.YES

    def _hits(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of these tokens already, leaving at least one token to compute."""
        full = (request.num_tokens - 1) // self.block_size
        return self.pool.find(request.names(full, self.block_size))

    def _allocate(self, request: Request, hits: list[int], tokens: int) -> bool:
        self.pool.touch(hits)
        request.block_ids += hits
        blocks = self.pool.take(self._missing(request, tokens))
        if blocks is None:
            self.pool.free_blocks(reversed(hits))
            del request.block_ids[len(request.block_ids) - len(hits) :]
            return False
        request.block_ids += blocks
        request.named = max(request.named, len(hits))
        return True

    def _park(self, request: Request, computed: int) -> None:
        request.status, request.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, computed
        self.parked[request.request_id] = request

    def _start(self, step: Step, request: Request, computed: int, count: int) -> None:
        request.num_computed_tokens = computed
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = computed
            self.counters.cache_queries += request.num_prompt_tokens
            self.counters.cache_hits += computed
        if request.status is Status.PREEMPTED:
            step.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
            self._add_cached(step, request, request.block_ids)
        else:
            step.scheduled_new_reqs.append(NewRequest(request.request_id, (list(request.block_ids),), computed))
        request.status = Status.RUNNING
        self.running.append(request)
        self._count(step, request, count)

    def _add_cached(self, step: Step, request: Request, blocks: list[int]) -> None:
        cached = step.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append((list(blocks),) if blocks else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)

    def _count(self, step: Step, request: Request, count: int) -> None:
        assert count > 0, (request.request_id, count)
        step.num_scheduled_tokens[request.request_id] = count
        self._left -= count

    # A step's end.

    def _name_blocks(self, request: Request) -> None:
        full = request.num_computed_tokens // self.block_size
        names = request.names(full, self.block_size)
        for position in range(request.named, full):
            before = names[position - 1] if position else None
            self.pool.name(request.block_ids[position], names[position], before)
        request.named = max(request.named, full)

    def _append(self, request: Request, token: int) -> None:
        request.all_token_ids.append(token)
        self.counters.generated_tokens += 1
        done = request.num_output_tokens
        if token == EOS and not request.ignore_eos and done >= request.min_tokens:
            self._finish(request, Status.FINISHED_STOPPED, token)
        elif done >= request.max_tokens:
            self._finish(request, Status.FINISHED_LENGTH_CAPPED, token)
        else:
            request.deliver(Delta(token, cached_tokens=request.num_cached_tokens))

    def _finish(self, request: Request, status: Status, token: int | None = None) -> None:
        was_parked = self.parked.pop(request.request_id, None) is not None
        if request in self.running:
            self.running.remove(request)
        elif not was_parked:
            self.waiting.remove(request)
        request.status = status
        held = self.side.finished(request, (list(request.block_ids),))
        if not (held or was_parked):
            self._forget(request)
        reason = FINISH_REASONS.get(status, "abort")
        params = self.side.reply_of(request)
        self.replied(params)
        request.deliver(Delta(token, reason, max(request.num_cached_tokens, 0), params))

    def _received(self, request: Request, *, failed: bool) -> None:
        if request.status.finished:
            self._forget(request)
            return
        del self.parked[request.request_id]
        if failed:
            self._release(request)
        else:
            self._name_blocks(request)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.free_blocks(reversed(request.block_ids))
        request.block_ids = []
        request.num_computed_tokens = request.named = 0

    def _forget(self, request: Request) -> None:
        self._release(request)
        del self.requests[request.request_id]
