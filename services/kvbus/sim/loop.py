"""A model of vLLM's scheduler: chunked prefill, prefix cache, preemption, parked requests, aborts, finished sets.

The order of the connector's hooks, what each may find, and the two assertions on the finished sets are those of
`vllm/v1/core/sched/scheduler.py`. The connector's scheduler half is reached through `Side`, in vLLM's words.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kvbus.sim.memory import Memory
from kvbus.sim.request import FINISHED, New, Output, Request, Status
from kvbus.sim.world import World

FIRST_SAMPLE = 1000
"""Sampled tokens count from here, so that none is mistaken for a prompt's."""


class Side(Protocol):
    """The scheduler half of a connector."""

    def on_new_request(self, request: Any) -> None: ...
    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]: ...
    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None: ...
    def build(self, output: Any) -> Any: ...
    def took(
        self,
        finished_recving: set[str] | None,
        finished_sending: set[str] | None,
        failed_recving: set[str] | None = None,
    ) -> None: ...
    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool: ...
    def reply_of(self, request: Any) -> dict[str, Any] | None: ...


class Loop:
    """One engine's scheduler. `budget` tokens per step, `chunk` of them per request; `awaits` names the transfer that
    a parked request waits for."""

    max_num_running_reqs = 64

    def __init__(
        self,
        world: World,
        name: str,
        memory: Memory,
        side: Side,
        *,
        budget: int,
        chunk: int,
        awaits: Callable[[Request], str],
    ) -> None:
        self.world, self.name, self.memory, self.side = world, name, memory, side
        self.budget, self.chunk, self.awaits = budget, chunk, awaits
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.landed: Callable[[Request], None] = lambda request: None
        """Called with a request that will use what was transferred."""
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.side.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """Its client is gone."""
        request = self.requests.get(request_id)
        if request is None or request.status in FINISHED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        delay = False
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            delay = request_id not in self.received
            self.received.discard(request_id)
            self.failed.discard(request_id)
        request.status = Status.FINISHED_ABORTED
        self._end(request, delay_free=delay)

    def schedule(self) -> Output:
        output = Output()
        left = self._schedule_running(output, self.budget)
        if not output.preempted_req_ids:
            self._schedule_waiting(output, left)
        return output

    def scheduled(self, output: Output) -> None:
        """After the connector's metadata is built."""
        for request, start, count in output.scheduled:
            request.num_computed_tokens = start + count

    def update(self, output: Output, received: set[str], failed: set[str], sent: set[str]) -> list[Request]:
        """A step has ended. Returns the requests that have sampled a token."""
        for request_id in failed:
            request = self.requests.get(request_id)
            if request is not None and request.status is Status.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self.failed.add(request_id)
        sampled = []
        for request, start, count in output.scheduled:
            if request.status is Status.RUNNING and start + count == len(request.tokens):
                sampled.append(request)
                request.tokens += (FIRST_SAMPLE + len(request.tokens),)
                if len(request.tokens) - len(request.prompt_token_ids) >= request.max_new:
                    request.status = Status.FINISHED_LENGTH_CAPPED
                    self.running.remove(request)
                    self._end(request, delay_free=False)
        self._take(received, sent, failed)
        return sampled

    def _take(self, received: set[str], sent: set[str], failed: set[str]) -> None:
        if not (received or sent):
            self.side.took(received, sent, failed)
            return
        for what, ids in (("finished_recving", received), ("finished_sending", sent)):
            for request_id in sorted(ids - self.requests.keys()):
                self.world.violate("4", "", f"{self.name}: {what} names {request_id}, which is not there")
        self.side.took(received, sent, failed)
        for request_id in sorted(received & self.requests.keys()):
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.received.add(request_id)
                request.parked = False
                if request_id not in failed:
                    self.landed(request)
            elif request.status in FINISHED:
                self._free(request)
            else:
                text = f"{self.name}: {request_id} received, but {request.status}"
                self.world.violate("4", request.transfer_id, text)
        for request_id in sorted(sent & self.requests.keys()):
            self._free(self.requests[request_id])

    def _schedule_running(self, output: Output, left: int) -> int:
        index = 0
        while index < len(self.running) and left > 0:
            request = self.running[index]
            start = request.num_computed_tokens
            count = min(len(request.tokens) - start, left, self.chunk)
            if count > 0:
                need = self._blocks(start + count) - len(request.block_ids)
                if not self._make_room(output, request, need):
                    break
                new = self.memory.allocate(request, need)
                request.block_ids += new
                self._admit(output, request, start, count, new)
                left -= count
            index += 1
        return left

    def _make_room(self, output: Output, request: Request, need: int) -> bool:
        while not self.memory.room_for(need, []):
            victim = self.running.pop()
            self.memory.release(victim, victim.block_ids, preempted=True)
            self.world.tell(self.name, victim.transfer_id, f"preempts {victim.request_id}")
            self.world.counts["preempted"] += 1
            victim.block_ids = []
            victim.num_computed_tokens = 0
            victim.status = Status.PREEMPTED
            self.waiting.insert(0, victim)
            output.preempted_req_ids.add(victim.request_id)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, output: Output, left: int) -> None:
        for request in list(self.waiting):
            if left <= 0:
                return
            if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._resume(request):
                continue
            hits: list[int] = []
            external, parks = 0, False
            if request.num_computed_tokens == 0:
                hits = self.memory.hits(request.tokens)
                local = len(hits) * self.memory.block_size
                matched, parks = self.side.matched_tokens(request, local)
                if matched is None:
                    continue
                external = matched
            else:
                local = request.num_computed_tokens
            start = local + external
            count = 0 if parks else min(len(request.tokens) - start, left, self.chunk)
            need = self._blocks(start + count) - (len(request.block_ids) or len(hits))
            if not self.memory.room_for(need, hits):
                return
            self.memory.touch(request, hits)
            request.block_ids += hits + self.memory.allocate(request, need)
            request.num_computed_tokens = start
            request.num_cached_tokens = local
            self.side.allocated(request, (request.block_ids,), external)
            if parks:
                request.status, request.parked = Status.WAITING_FOR_REMOTE_KVS, True
                request.awaits = self.awaits(request)
                continue
            self._start(output, request, start, count)
            left -= count

    def _start(self, output: Output, request: Request, start: int, count: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        if request.status is Status.PREEMPTED:
            output.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
            self._admit(output, request, start, count, list(request.block_ids))
        else:
            output.scheduled_new_reqs.append(New(request))
            self._admit(output, request, start, count, None)
        request.status = Status.RUNNING

    def _admit(self, output: Output, request: Request, start: int, count: int, new: list[int] | None) -> None:
        output.scheduled.append((request, start, count))
        output.num_scheduled_tokens[request.request_id] = count
        output.total_num_scheduled_tokens += count
        self.memory.cache(request, request.block_ids, request.tokens, start + count)
        if new is not None:
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append((new,) if new else None)
            cached.num_computed_tokens.append(start)

    def _resume(self, request: Request) -> bool:
        """A parked request whose transfer is over goes on, with what was loaded or from the start."""
        if request.request_id not in self.received:
            return False
        self.received.discard(request.request_id)
        request.status = Status.WAITING
        if request.request_id in self.failed:
            self.failed.discard(request.request_id)
            self.memory.release(request, request.block_ids)
            request.block_ids = []
            self.world.counts["recomputed"] += 1
            return True
        self.memory.cache(request, request.block_ids, request.tokens, request.num_computed_tokens)
        self.world.counts["loaded"] += 1
        request.num_computed_tokens = min(request.num_computed_tokens, len(request.tokens) - 1)
        return True

    def _end(self, request: Request, *, delay_free: bool) -> None:
        held = self.side.finished(request, (request.block_ids,))
        request.reply = self.side.reply_of(request)
        if held or delay_free:
            return
        self._free(request)

    def _free(self, request: Request) -> None:
        request.parked = False
        self.memory.release(request, request.block_ids)
        del self.requests[request.request_id]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.memory.block_size)
