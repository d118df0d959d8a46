"""A cluster in simulated time: requests come, routers choose, engines work. Pure and the same for a seed.

    arrival ─► router ─► prefill's queue ─► computed ─► handed over ─► decode's batch ─► ended
                  │          refused: full, or late        ▲
                  └─ early: a seat at decode at once ──────┘ deferred: a seat now; local: decode computes it

A request is refused where a prefill's queue is full, and given up where it can no longer have its first token in time
when its turn comes. Both count as missed, and cost no further work, whatever the policy.
"""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec

from kvbus.goodput.costs import Costs
from kvbus.goodput.engines import Decode, Job, Prefill
from kvbus.goodput.router import Beginnings, SimRouter
from kvbus.goodput.traces import Ask
from kvbus.router.policies import Policy
from kvbus_schemas import EVERYONE, Post, Role


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What there is beside the engines."""

    name: str = "one router"
    prefills: int = 6
    decodes: int = 12
    routers: int = 1
    restarts: tuple[float, ...] = ()
    """When routers are restarted, one after the other, as shares of the run."""


class Outcome(msgspec.Struct):
    """What became of the requests."""

    requests: int = 0
    good: int = 0
    refused: int = 0
    given_up: int = 0
    slow_first: int = 0
    slow_tokens: int = 0
    span_s: float = 0.0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    ttfts_s: list[float] = []
    modes: dict[str, int] = {}

    @property
    def goodput(self) -> float:
        """Requests a second that kept both promises."""
        return self.good / self.span_s if self.span_s else 0.0


class Cluster:
    """`run` it once."""

    def __init__(self, costs: Costs, setup: Setup, policy: Callable[[], Policy], seed: int) -> None:
        self.costs, self.setup = costs, setup
        self.outcome = Outcome()
        self._policy = policy
        self._chance = random.Random(seed)  # noqa: S311  (reproducible)
        self._prefills = {f"p{n}": Prefill(f"p{n}", costs) for n in range(setup.prefills)}
        self._decodes = {f"d{n}": Decode(f"d{n}", costs) for n in range(setup.decodes)}
        roles: dict[str, Role] = dict.fromkeys(self._prefills, "prefill")
        roles |= dict.fromkeys(self._decodes, "decode")
        self._routers = [SimRouter(policy(), roles) for _ in range(setup.routers)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._prompts: list[Beginnings] = []
        self._open = 0
        self.now_s = 0.0

    def run(self, asks: list[Ask], prompts: list[Beginnings]) -> Outcome:
        """Serve these requests; `prompts` are theirs."""
        self._prompts = prompts
        self._open = len(asks)
        self.outcome.requests, self.outcome.span_s = len(asks), asks[-1].at_s - asks[0].at_s
        for number, ask in enumerate(asks):
            self._at(ask.at_s, self._arrive, Job(number, ask))
        for number, share in enumerate(self.setup.restarts):
            self._at(asks[-1].at_s * share, self._restart, number % len(self._routers))
        self._at(0.0, self._report)
        while self._events and self._open:
            self.now_s, _, work, given = heappop(self._events)
            work(*given)
        for prefill in self._prefills.values():
            self.outcome.hit_tokens += prefill.hit_tokens
            self.outcome.prompt_tokens += prefill.prompt_tokens
        return self.outcome

    def _at(self, at_s: float, work: Callable[..., None], *given: Any) -> None:
        heappush(self._events, (at_s, next(self._order), work, given))

    # Routers

    def _arrive(self, job: Job) -> None:
        job.router = self._chance.randrange(len(self._routers))
        choice = self._routers[job.router].choose(job, self._prompts[job.number], self.now_s)
        self.outcome.modes[choice.mode] = self.outcome.modes.get(choice.mode, 0) + 1
        if len(self._routers) > 1:
            self._at(self.now_s + self.costs.bus_s, self._decided, job.router, job.prefill, job.decode, job.work)
        if choice.mode == "local":
            self._seat(job)
            return
        prefill = self._prefills[job.prefill]
        if not prefill.accept(job):
            self.outcome.refused += 1
            self._routers[job.router].fleet.finished(job.prefill, job.work)
            if job.decode:
                self._routers[job.router].fleet.finished(job.decode)
            self._open -= 1
            return
        if job.decode:
            self._seat(job)
        hashed = prefill.cache.mirror.hashed(job.key, job.ask.hashes, job.ask.tokens)
        self._at(self.now_s + self.costs.bus_s, self._tell, (hashed,), job.router)
        self._start(prefill)

    def _decided(self, router: int, prefill: str, decode: str, work: int) -> None:
        """The other routers hear of a choice."""
        for number, other in enumerate(self._routers):
            if number != router:
                for name, tokens in ((prefill, work), (decode, 0 if prefill else work)):
                    if name:
                        other.fleet.sent_by_others(name, tokens)

    def _tell(self, posts: tuple[Post, ...] | list[Post], only: int = -1) -> None:
        for number, router in enumerate(self._routers):
            if only in {-1, number}:
                for mapped in router.hear(posts, self.now_s):
                    others = [other for other in range(len(self._routers)) if other != number]
                    for other in others:
                        self._at(self.now_s + self.costs.bus_s, self._tell, (Post(EVERYONE, mapped),), other)

    def _report(self) -> None:
        loads = [prefill.load() for prefill in self._prefills.values()]
        loads += [decode.load() for decode in self._decodes.values()]
        self._tell([Post(EVERYONE, load) for load in loads])
        for router in self._routers:
            for post in router.due(self.now_s):
                self._at(self.now_s + self.costs.bus_s, self._restate, post.to)
        if self._open:
            self._at(self.now_s + self.costs.report_every_s, self._report)

    def _restate(self, name: str) -> None:
        self._at(self.now_s + self.costs.bus_s, self._tell, self._engine(name).cache.mirror.restate())

    def _engine(self, name: str) -> Prefill | Decode:
        return self._prefills[name] if name in self._prefills else self._decodes[name]

    def _restart(self, number: int) -> None:
        self._routers[number].restart(self._policy())

    # Prefill

    def _start(self, prefill: Prefill) -> None:
        job, end_s, late = prefill.start(self.now_s)
        for dropped in late:
            self._give_up(dropped)
        if job is not None:
            self._at(end_s, self._computed, prefill)

    def _computed(self, prefill: Prefill) -> None:
        job = prefill.running
        assert job is not None
        posts = prefill.finish()
        self._at(self.now_s + self.costs.bus_s, self._tell, posts)
        job.prefilled_s = self.now_s
        router = self._routers[job.router]
        router.fleet.finished(job.prefill, job.work)
        if job.late:
            pass
        elif not job.decode:
            job.decode = router.choose_decode(job, self._prompts[job.number], self.now_s)
            self._seat(job)
        elif job.seated_s >= 0:
            self._hand_over(job)
        self._start(prefill)

    # Decode

    def _seat(self, job: Job) -> None:
        decode = self._decodes[job.decode]
        decode.waiting.append(job)
        self._seat_all(decode)

    def _seat_all(self, decode: Decode) -> None:
        for job in decode.seat(self.now_s):
            if self.now_s > job.ask.at_s + self.costs.ttft_max_s:
                self._give_up(job)
            elif job.mode == "local":
                self._compute(decode, job)
            elif job.prefilled_s >= 0:
                self._hand_over(job)

    def _compute(self, decode: Decode, job: Job) -> None:
        """Mode local: the batch stands still meanwhile, one prompt after the other."""
        missing = job.ask.tokens - decode.cache.hit(job.ask)
        end_s = decode.delay(self.now_s, missing / self.costs.prefill_tokens_per_s)
        self._watch(decode)
        self._at(end_s + self.costs.prefill_base_s, self._begin, job)

    def _hand_over(self, job: Job) -> None:
        """Decode takes what it lacks."""
        missing = job.ask.tokens - self._decodes[job.decode].cache.hit(job.ask)
        self._at(self.now_s + self.costs.transfer_s(missing), self._begin, job)

    def _begin(self, job: Job) -> None:
        decode = self._decodes[job.decode]
        decode.begin(job, self.now_s)
        self._at(self.now_s + self.costs.bus_s, self._tell, decode.cache.keep(job.ask))
        job.first_s = self.now_s + self.costs.step_base_s
        self._watch(decode)

    def _watch(self, decode: Decode) -> None:
        """Look when the next request of the batch ends; what was to be looked at before counts no more."""
        end_s = decode.next_end_s()
        decode.look_s = float("inf") if end_s is None else max(end_s, self.now_s)
        if end_s is not None:
            self._at(decode.look_s, self._look, decode, decode.look_s)

    def _look(self, decode: Decode, at_s: float) -> None:
        if at_s != decode.look_s:
            return
        done = decode.ended(self.now_s)
        for job in done:
            decode.leave(job)
            self._judge(job)
        if done:
            self._seat_all(decode)
        self._watch(decode)

    # Ends

    def _judge(self, job: Job) -> None:
        costs, out = self.costs, self.outcome
        self._open -= 1
        self._routers[job.router].fleet.finished(job.decode, 0 if job.prefill else job.work)
        ttft_s = job.first_s - job.ask.at_s
        tpot_s = (self.now_s - job.first_s) / max(1, job.ask.answer - 1)
        out.ttfts_s.append(ttft_s)
        out.slow_first += ttft_s > costs.ttft_max_s
        out.slow_tokens += tpot_s > costs.tpot_max_s
        out.good += ttft_s <= costs.ttft_max_s and tpot_s <= costs.tpot_max_s

    def _give_up(self, job: Job) -> None:
        """It would be late: nobody works on it any more, but a prefill that has begun goes on to its end."""
        if job.late:
            return
        job.late = True
        self.outcome.given_up += 1
        self._open -= 1
        fleet = self._routers[job.router].fleet
        if job.prefill and job.prefilled_s < 0 and self._prefills[job.prefill].running is not job:
            fleet.finished(job.prefill, job.work)
        if job.decode:
            fleet.finished(job.decode, 0 if job.prefill else job.work)
            decode = self._decodes[job.decode]
            if job.seated_s >= 0:
                decode.leave(job)
                self._seat_all(decode)
            else:
                decode.waiting.remove(job)
