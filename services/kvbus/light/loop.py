"""The engine's loop in a thread of its own: schedule, tell the ranks, compute, take what they report. As in vLLM's
engine core, nothing else touches the scheduler; requests and aborts come through a queue."""

import threading
import time
from collections.abc import Callable

import structlog

from kvbus.engine.handle import EngineHandle
from kvbus.engine.rank import RankSide
from kvbus.light.language import next_token
from kvbus.light.memory import KvMemory
from kvbus.light.request import Delta, Request, Status
from kvbus.light.scheduler import Scheduler, Step

log = structlog.get_logger()

NO_ROOM_WAIT_S = 0.005
"""How long a loop sleeps when nothing can be scheduled and nothing is on its way."""


class Inbox(EngineHandle):
    """What the engine is asked to do; its condition is also what the connector's hooks sleep on."""

    light_scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler | None:
        return self.light_scheduler

    def wake_idle(self) -> None:
        self.put(_nothing)

    def put(self, work: Callable[[], None]) -> None:
        """Do this at the beginning of a step. From any thread."""
        self._own.put(work)

    def take(self, *, wait: bool) -> list[Callable[[], None]]:
        """All that there is; with `wait`, at least one."""
        works = [self._own.get()] if wait else []
        while not self._own.empty():
            works.append(self._own.get())
        return works


def _nothing() -> None:
    """Work that is only there to have a step taken."""


class EngineLoop:
    """`start` and `stop` it; `failed` is true, and `on_failed` was called, when it has ended by itself."""

    def __init__(
        self,
        scheduler: Scheduler,
        rank: RankSide,
        inbox: Inbox,
        *,
        token_us: float,
        prefill_tokens_per_s: float,
        eos_every: int,
    ) -> None:
        self.scheduler, self.rank, self.inbox = scheduler, rank, inbox
        inbox.light_scheduler = scheduler
        self.token_s, self.prefill_tokens_per_s = token_us / 1e6, prefill_tokens_per_s
        self.eos_every = eos_every
        self.failed = False
        self.on_failed: Callable[[], None] = lambda: None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="light-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.inbox.put(self._stop)
        self._thread.join(5.0)

    def add(self, request: Request) -> None:
        """Serve this request. From any thread."""
        self.inbox.put(lambda: self.scheduler.add(request))

    def abort(self, request_id: str) -> None:
        """Stop serving it, if it still runs. From any thread."""
        self.inbox.put(lambda: self.scheduler.abort(request_id))

    @property
    def idle(self) -> bool:
        """Whether no request runs, waits or holds blocks, and nothing that is kept is being written to anybody."""
        return not (self.scheduler.requests or self.scheduler.side.reuse.retention.serving)

    @property
    def _due(self) -> bool:
        """Whether a step has something to do, or to wait for."""
        return not self.idle or self.scheduler.side.has_news()

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                for work in self.inbox.take(wait=not self._due):
                    work()
                if self._due:
                    self._step()
        except Exception:
            self.failed = True
            log.exception("engine_loop_failed")
            for request in self.scheduler.requests.values():
                if not request.status.finished:
                    request.deliver(Delta(finish_reason="abort"))
            self.on_failed()

    def _step(self) -> None:
        step = self.scheduler.schedule()
        orders = self.scheduler.side.build(step)
        self.rank.before_forward(orders)
        sampled = self._forward(step)
        self.rank.step(orders, None)
        self.scheduler.update(step, sampled, *self.rank.results(orders))
        self.scheduler.side.reuse.quiet(self.rank.take_quiet())
        if not step.num_scheduled_tokens and not orders and self._stuck():
            self.inbox.wait(NO_ROOM_WAIT_S, lambda: False)

    def _stuck(self) -> bool:
        """Whether `build` has not slept although there was nothing to do."""
        side = self.scheduler.side
        return not (side.consumer.open or side.producer.holding() or side.reuse.retention.serving)

    def _forward(self, step: Step) -> dict[str, int]:
        """Compute. Blocks change when the time has passed: what is written elsewhere too early is seen there."""
        seconds = self._seconds(step)
        if seconds:
            time.sleep(seconds)
        return dict(filter(None, (self._compute(*scheduled) for scheduled in step.num_scheduled_tokens.items())))

    def _compute(self, request_id: str, count: int) -> tuple[str, int] | None:
        request = self.scheduler.requests[request_id]
        assert request.status is Status.RUNNING, request
        start = request.num_computed_tokens
        end = start + count
        memory: KvMemory = self.scheduler.memory
        memory.write(request.block_ids, start, request.all_token_ids[start:end])
        if end < request.num_tokens:
            return None
        early = request.num_output_tokens + 1 < request.min_tokens
        return request_id, next_token(memory.read(request.block_ids, end), eos_every=0 if early else self.eos_every)

    def _seconds(self, step: Step) -> float:
        growing = sum(count == 1 for count in step.num_scheduled_tokens.values())
        prompts = step.total_num_scheduled_tokens - growing
        seconds = self.token_s if growing else 0.0
        if prompts and self.prefill_tokens_per_s:
            seconds += prompts / self.prefill_tokens_per_s
        return seconds
