"""Engines of the simulation: a prefill with a queue and a prefix cache, a decode with a batch and KV memory. Pure."""

from collections import OrderedDict, deque
from heapq import heappop, heappush

from kvbus.engine.cache_events import CacheEvent, CacheMirror
from kvbus.goodput.costs import Costs
from kvbus.goodput.traces import BLOCK, Ask
from kvbus_schemas import LoadReported, Post


class Job:
    """One request on its way. Times are the simulation's, -1 for what has not happened."""

    __slots__ = (
        "ask", "decode", "first_s", "key", "late", "mode", "number", "prefill", "prefilled_s", "router", "seated_s",
        "work",
    )  # fmt: skip

    def __init__(self, number: int, ask: Ask) -> None:
        self.number, self.ask = number, ask
        self.key = f"{number:032x}"
        self.mode = ""
        self.prefill = self.decode = ""
        self.router = 0
        self.work = 0
        self.prefilled_s = self.seated_s = self.first_s = -1.0
        self.late = False
        """Given up: its first token can no longer come in time."""


class Cache:
    """An engine's prefix cache; what was used longest ago goes first, of one prompt its end."""

    def __init__(self, name: str, blocks_max: int) -> None:
        self.mirror = CacheMirror(name, BLOCK)
        self.blocks_max = blocks_max
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def hit(self, ask: Ask) -> int:
        """Tokens of a prompt that are here. The last one is always computed."""
        hit = 0
        for name in ask.hashes:
            if name not in self._blocks:
                break
            hit += 1
        return min(hit * BLOCK, ask.tokens - 1)

    def keep(self, ask: Ask) -> list[Post]:
        """A prompt's KV is here; what the engine says of it."""
        blocks = self._blocks
        stored = [name for name in ask.hashes if name not in blocks]
        for name in reversed(ask.hashes):
            blocks[name] = None
            blocks.move_to_end(name)
        gone = []
        while len(blocks) > self.blocks_max:
            gone.append(blocks.popitem(last=False)[0])
        return self.mirror.receive([CacheEvent("removed", gone), CacheEvent("stored", stored)])


class Prefill:
    """One prompt after the other, in order of arrival."""

    def __init__(self, name: str, costs: Costs) -> None:
        self.name, self.costs = name, costs
        self.queue: deque[Job] = deque()
        self.running: Job | None = None
        self.busy_s = 0.0
        self.hit_tokens = self.prompt_tokens = 0
        self.cache = Cache(name, costs.cache_tokens // BLOCK)

    def accept(self, job: Job) -> bool:
        """Let it wait here; False: the queue is full."""
        if len(self.queue) >= self.costs.queue_max:
            return False
        self.queue.append(job)
        return True

    def start(self, now_s: float) -> tuple[Job | None, float, list[Job]]:
        """(the job that begins, its end, jobs that cannot be in time any more)."""
        late: list[Job] = []
        while self.running is None and self.queue:
            job = self.queue.popleft()
            if job.late:
                continue
            hit = self.cache.hit(job.ask)
            took_s = self.costs.prefill_s(max(1, job.ask.tokens - hit))
            if now_s + took_s > job.ask.at_s + self.costs.ttft_max_s:
                late.append(job)
                continue
            self.running = job
            self.busy_s += took_s
            self.hit_tokens += hit
            self.prompt_tokens += job.ask.tokens
            return job, now_s + took_s, late
        return None, 0.0, late

    def finish(self) -> list[Post]:
        """The prompt is computed: its blocks are in the cache, and others have left it."""
        job, self.running = self.running, None
        assert job is not None
        return self.cache.keep(job.ask)

    def load(self) -> LoadReported:
        """As an engine reports it."""
        total = self.cache.blocks_max
        free = total - sum(len(job.ask.hashes) for job in self.queue)
        return LoadReported(
            engine_id=self.name,
            running=int(self.running is not None),
            waiting=len(self.queue),
            free_blocks=max(0, free),
            total_blocks=total,
        )


class Decode:
    """All requests of the batch grow by a token in a step; between two changes of the batch all steps are alike."""

    def __init__(self, name: str, costs: Costs) -> None:
        self.name, self.costs = name, costs
        self.waiting: deque[Job] = deque()
        self.seats = 0
        self.cache = Cache(name, costs.decode_tokens // BLOCK)
        """Prompts of requests that run, and of those that have ended as long as nobody needs their memory."""
        self.tokens = 0
        """Reserved, by requests that run and those whose KV is on its way."""
        self.batch: list[tuple[float, int, Job]] = []
        """(the step after which it has ended, number, job)."""
        self.look_s = float("inf")
        """When somebody looks for requests that have ended."""
        self._steps = 0.0
        self._batch_tokens = 0
        self._at_s = 0.0

    def seat(self, now_s: float) -> list[Job]:
        """Reserve memory for those that wait, in their order; returns those that have it now."""
        seated = []
        while self.waiting and self.seats < self.costs.running_max:
            need = _size(self.waiting[0])
            if self.tokens + need > self.costs.decode_tokens and self.seats:
                break
            job = self.waiting.popleft()
            self.tokens += need
            self.seats += 1
            job.seated_s = now_s
            seated.append(job)
        return seated

    def leave(self, job: Job) -> None:
        """Its memory is free again."""
        self.tokens -= _size(job)
        self.seats -= 1

    def begin(self, job: Job, now_s: float) -> None:
        """Its KV is here: it joins the batch."""
        self._advance(now_s)
        heappush(self.batch, (self._steps + job.ask.answer, job.number, job))
        self._batch_tokens += job.ask.tokens

    def delay(self, now_s: float, seconds: float) -> float:
        """The engine computes a prompt itself: the batch stands still until the moment that this returns."""
        self._advance(now_s)
        self._at_s = max(self._at_s, now_s) + seconds
        return self._at_s

    def next_end_s(self) -> float | None:
        """When the next request of the batch ends, if nothing changes."""
        if not self.batch:
            return None
        return self._at_s + max(0.0, self.batch[0][0] - self._steps) * self._step_s()

    def ended(self, now_s: float) -> list[Job]:
        """Those that have ended by now."""
        self._advance(now_s)
        done = []
        while self.batch and self.batch[0][0] <= self._steps + 1e-6:
            job = heappop(self.batch)[2]
            self._batch_tokens -= job.ask.tokens
            done.append(job)
        return done

    def load(self) -> LoadReported:
        """As an engine reports it."""
        total = self.costs.decode_tokens // BLOCK
        return LoadReported(
            engine_id=self.name,
            running=len(self.batch),
            waiting=self.seats - len(self.batch) + len(self.waiting),
            free_blocks=max(0, total - self.tokens // BLOCK),
            total_blocks=total,
        )

    def _step_s(self) -> float:
        return self.costs.step_s(len(self.batch), self._batch_tokens)

    def _advance(self, now_s: float) -> None:
        if now_s > self._at_s:
            if self.batch:
                self._steps += (now_s - self._at_s) / self._step_s()
            self._at_s = now_s


def _size(job: Job) -> int:
    return job.ask.tokens + job.ask.answer
