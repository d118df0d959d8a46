"""One campaign: a fleet of its own, right answers beforehand, steady load, the lanes of faults, and the reckoning."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from kvbus.chaos.answers import Known, learn
from kvbus.chaos.ear import Ear, listen
from kvbus.chaos.faults import Faults
from kvbus.chaos.load import Clients
from kvbus.chaos.parts import Parts
from kvbus.chaos.plan import Fault, plan
from kvbus.chaos.score import Happened, Outcome, Score, clear, first_right, score
from kvbus.chaos.script import scripts
from kvbus.chaos.settle import settle
from kvbus.errors import BusError
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus.trace.render import details

MATCHERS, REUSES, ROUTERS = 2, 1, 2
STORIES_MAX = 10
LOOK_EVERY_S = 0.2
TICK_S = 1.0

Say = Callable[[str], None]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for. Seconds."""

    seed: int
    faults: int
    engine: Literal["vllm", "sim"]
    prefill: int = 2
    decode: int = 2
    model: str = "tiny"
    quick: bool = False
    kinds: tuple[str, ...] = ()
    """Only faults of these kinds; none: of all."""
    concurrency: int = 8
    scripts: int = 80
    work_dir: Path = Path(".kvbus/chaos")
    gap_s: tuple[float, float] = (1.0, 6.0)
    warm_s: float = 3.0
    """Load before the first fault."""
    deadline_s: float = 90.0
    """The routers' own; a client that has no answer 10 s later hangs."""
    transfer_deadline_s: float = 30.0
    reuse_ttl_s: float = 20.0
    recover_max_s: float = 400.0
    seconds_max: float = 2400.0
    """No fault begins after so long under load."""

    @property
    def counts(self) -> dict[str, int]:
        return {"prefill": self.prefill, "decode": self.decode, "matcher": MATCHERS, "reuse": REUSES, "router": ROUTERS}


CLIENT_MARGIN_S = 10.0


class Result(msgspec.Struct, kw_only=True):
    """All that was seen."""

    options: Options
    score: Score
    happened: list[Happened]
    outcomes: list[Outcome]
    stories: dict[str, object]
    """Of what went wrong, by request id, as `kvbus trace show --json` tells them."""
    crash_logs: dict[str, str]
    load_s: float


async def campaign(options: Options, say: Say, tick: Say, stopping: asyncio.Event) -> Result:
    """Run it, until `stopping` at most. `say` gets lines to keep, `tick` how it stands, every second. Raises KvbusError
    when the fleet does not start."""
    async with start_fleet(_fleet_options(options), say) as fleet, _http() as http:
        known = await _learn(options, fleet, http, say)
        ear = await listen(fleet)
        try:
            return await _Run(options, fleet, http, ear, known, say, tick).run(stopping)
        finally:
            await ear.close()


class _Run:
    def __init__(
        self, options: Options, fleet: Fleet, http: aiohttp.ClientSession, ear: Ear, known: Known, say: Say, tick: Say
    ) -> None:
        self.options, self.fleet, self.ear, self.say, self.tick = options, fleet, ear, say, tick
        self.parts = Parts(fleet)
        urls = zip(fleet.routers, fleet.router_ports, strict=True)
        routers = {child.name: f"http://127.0.0.1:{port}" for child, port in urls}
        deadline_s = options.deadline_s + CLIENT_MARGIN_S
        self.clients = Clients(http, ear, routers, known, seed=options.seed, deadline_s=deadline_s)
        self.faults = Faults(fleet, self.parts, ear, self.clients, http, options.seed)
        self.happened: list[Happened] = []
        self.since_s = time.monotonic()

    async def run(self, cut_short: asyncio.Event) -> Result:
        wanted = self.options
        lanes = plan(wanted.seed, wanted.faults, wanted.counts, wanted.gap_s, wanted.kinds)
        stopping = asyncio.Event()
        watching = asyncio.gather(self.parts.watch(), self._tick())
        loads = [asyncio.create_task(self.clients.steady(stopping)) for _ in range(self.options.concurrency)]
        try:
            await asyncio.sleep(self.options.warm_s)
            await asyncio.gather(*(self._lane(faults, cut_short) for faults in lanes.values()))
            stopping.set()
            await asyncio.gather(*loads)
            load_s = time.monotonic() - self.since_s
            self.say("load has ended: waiting until every block is free")
            lost = await settle(self.fleet, self.ear, self._settle_max_s())
            self.say(f"settled: {sum(lost.values())} blocks lost")
        finally:
            watching.cancel()
            for task in loads:
                task.cancel()
            await asyncio.gather(watching, *loads, return_exceptions=True)
            await self.faults.close()
        return self._result(lost, load_s)

    async def _lane(self, faults: list[Fault], cut_short: asyncio.Event) -> None:
        for fault in faults:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cut_short.wait(), fault.gap_s)
            if cut_short.is_set() or time.monotonic() - self.since_s > self.options.seconds_max:
                return
            await self._one(fault)

    async def _one(self, fault: Fault) -> None:
        happened = Happened(fault=fault, began_s=time.monotonic())
        self.happened.append(happened)
        try:
            happened.note = await self.faults.carry_out(fault)
        except BusError as error:
            happened.note = f"could not be carried out: {error}"
        happened.ended_s = time.monotonic()
        deadline_s = happened.ended_s + self.options.recover_max_s
        while not happened.recovered_s and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_EVERY_S)
            right = first_right(happened, self.clients.outcomes)
            if right is not None:
                happened.recovered_s, happened.shown_by = right.ended_s, right.request_id
        self._tell(happened)

    def _tell(self, happened: Happened) -> None:
        fault = happened.fault
        took = "not right again" if happened.took_s is None else f"right again after {happened.took_s:.1f} s"
        self.say(f"{self._state()}  #{fault.number} {fault.kind} {fault.target}: {happened.note}; {took}")

    async def _tick(self) -> None:
        while True:
            open_now = [f"{one.fault.kind} {one.fault.target}" for one in self.happened if not one.recovered_s]
            self.tick(f"{self._state()}  {self.clients.in_flight} in flight; {', '.join(open_now)}")
            await asyncio.sleep(TICK_S)

    def _state(self) -> str:
        done = sum(1 for one in self.happened if one.recovered_s)
        ends = Counter(outcome.verdict for outcome in self.clients.outcomes)
        return (
            f"{time.monotonic() - self.since_s:5.0f} s  {done}/{self.options.faults} faults  {ends.total()} requests, "
            f"{ends['error']} errors, {ends['wrong']} wrong, {ends['hang']} hanging, {len(self.parts.crashes)} ended"
        )

    def _settle_max_s(self) -> float:
        return self.options.transfer_deadline_s + self.options.reuse_ttl_s + 20.0

    def _result(self, lost: dict[str, int], load_s: float) -> Result:
        forgeries = sum(heard.subject.rsplit(".", 1)[-1] in self.faults.forged for heard in self.ear.heard)
        outcomes = self.clients.outcomes
        counted = score(
            outcomes,
            self.happened,
            self.parts.crashes,
            lost,
            forgeries_heard=forgeries,
            dead_letters=self.ear.dead_letters,
        )
        return Result(
            options=self.options,
            score=counted,
            happened=self.happened,
            outcomes=[outcome for outcome in outcomes if outcome.verdict != "right"],
            stories=dict(self._stories(outcomes)),
            crash_logs={
                f"{crash.name} at {crash.at_s - self.since_s:.0f} s": crash.log for crash in self.parts.crashes
            },
            load_s=load_s,
        )

    def _stories(self, outcomes: list[Outcome]) -> list[tuple[str, object]]:
        bad = [o for o in outcomes if o.verdict in ("wrong", "hang")]
        bad += [o for o in outcomes if o.verdict == "error" and not clear(o, self.happened)]
        stories: list[tuple[str, object]] = []
        for outcome in bad[:STORIES_MAX]:
            story = self.ear.story(outcome.transfer_id)
            if story is not None:
                stories.append((outcome.request_id, details(story)))
        return stories


async def _learn(options: Options, fleet: Fleet, http: aiohttp.ClientSession, say: Say) -> Known:
    """Ask the plain engine, then end it: its CPU is needed."""
    known = await learn(http, fleet.plain_url, options.model, scripts(options.seed, options.scripts))
    turns = sum(len(said) for said in known.answers.values())
    say(f"the plain engine has answered {turns} requests; {options.scripts + 12 - len(known.answers)} were too close")
    plain = fleet.engine("plain")
    fleet.engines.remove(plain)
    await plain.child.stop()
    return known


def _fleet_options(options: Options) -> FleetOptions:
    own = {
        "vllm": ["--num-gpu-blocks-override", "192", "--max-num-batched-tokens", "256"],
        "sim": ["--blocks", "192", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"],
    }
    return FleetOptions(
        prefill=options.prefill,
        decode=options.decode,
        model=options.model,
        engine=options.engine,
        work_dir=options.work_dir,
        engine_arguments=own[options.engine],
        router_arguments=["--deadline-s", str(options.deadline_s)],
        engine_settings={"reuse_ttl_s": str(options.reuse_ttl_s)},
        environ={"KVBUS_ROUTER_TRANSFER_DEADLINE_S": str(options.transfer_deadline_s)},
        matchers=MATCHERS,
        reuse=REUSES,
        routers=ROUTERS,
        secure=True,
        plain=True,
    )


@contextlib.asynccontextmanager
async def _http() -> AsyncIterator[aiohttp.ClientSession]:
    """A connection for each request: none is broken by what happened before it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        yield http
