"""`kvbus bench capture`: does the trace slow the live path? Time to first token with the stream capturing and not.

One fleet serves both arms in turn: between rounds the stream's subjects are switched, so that it takes in everything or
nothing of the bus, and nothing else changes. Light engines compute in no time, so that coordination is most of what is
measured; `--engine vllm` takes real ones.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import typer

from kvbus.bench.report import Arm, Report, metric
from kvbus.bus import Bus, BusSettings
from kvbus.bus.trace import MARK_ROOT
from kvbus.errors import BusError, CommandFailed, ConfigError
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus.process import new_incarnation, process_name
from kvbus_schemas import subjects

OFF, ON = "not captured", "captured"
CONCURRENCIES = (1, 8)
PROMPT_CHARS = 600
WARM_UP = 16
ALL = [subjects.everything(), f"{MARK_ROOT}.>"]
NOTHING = [f"{MARK_ROOT}.>"]
FAST = ["--prefill-tokens-per-s", "0", "--token-us", "0", "--max-num-batched-tokens", "1024", "--blocks", "2048"]
SEED = 5

Engine = Literal["sim", "vllm"]


class Capture:
    """Switches what the trace takes in."""

    def __init__(self, bus: Bus) -> None:
        self._jetstream = bus._jetstream  # noqa: SLF001  (a benchmark changes what no process may)

    async def switch(self, *, on: bool) -> None:
        """From now on everything, or nothing."""
        info = await self._jetstream.info(subjects.TRACE_STREAM)
        if info is None:
            raise BusError(f"there is no stream {subjects.TRACE_STREAM}")
        config = info["config"] | {"subjects": ALL if on else NOTHING}
        await self._jetstream.api(f"STREAM.UPDATE.{subjects.TRACE_STREAM}", config)

    async def count(self) -> int:
        """Messages taken in so far."""
        info = await self._jetstream.info(subjects.TRACE_STREAM)
        return int(info["state"]["last_seq"]) if info else 0


async def first_byte_ms(http: aiohttp.ClientSession, fleet: Fleet, number: float) -> float:
    """One streamed request whose prompt no cache knows; the answer is read to its end."""
    prompt = (f"{number} " + "what a process knows it says on the bus, once. " * 20)[:PROMPT_CHARS]
    body = {"model": fleet.options.model, "prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0}
    sent_s = time.perf_counter()
    early = {"X-Kvbus-Mode": "early"}  # the mode that says most
    async with http.post(fleet.base_url + "/v1/completions", json=body, headers=early) as answer:
        await answer.content.readany()
        took_s = time.perf_counter() - sent_s
        await answer.read()
        if answer.status != 200:  # noqa: PLR2004
            raise CommandFailed(f"the router answered {answer.status}")
        return took_s * 1000


async def load(http: aiohttp.ClientSession, fleet: Fleet, *, requests: int, concurrency: int) -> list[float]:
    """So many requests, so many at a time; milliseconds to the first byte of each."""
    rng = random.Random()  # noqa: S311  (prompts that nobody has asked before)
    left = list(range(requests))
    found: list[float] = []

    async def one_after_the_other() -> None:
        while left:
            left.pop()
            found.append(await first_byte_ms(http, fleet, rng.random()))

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return found


class Rounds:
    """What was measured, by arm and number at a time."""

    def __init__(self) -> None:
        self.ttft_ms: dict[tuple[str, int], list[list[float]]] = {}
        self.captured: dict[str, list[float]] = {}

    def arm(self, name: str) -> Arm:
        """One arm of the report."""
        metrics = {f"ttft_ms_at_{count}": metric(self.ttft_ms.get((name, count), [])) for count in CONCURRENCIES}
        metrics["messages_captured_per_request"] = metric([self.captured.get(name, [])])
        return Arm(name=name, metrics=metrics)

    def difference(self, concurrency: int) -> tuple[float, float]:
        """Median over the rounds of captured less not captured, and the spread of an arm's own rounds, both in
        milliseconds of a round's median."""
        on, off = ([statistics.median(values) for values in self.ttft_ms[arm, concurrency]] for arm in (ON, OFF))
        apart = statistics.median(one - other for one, other in zip(on, off, strict=True))
        return apart, max(half_range(on), half_range(off))


def half_range(values: list[float]) -> float:
    """Half the distance between the quartiles; of fewer than four values half their range."""
    if len(values) < 4:  # noqa: PLR2004
        return (max(values) - min(values)) / 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


async def measure(engine: Engine, *, rounds: int, requests: int, say: Any) -> Report:
    """Run it. Raises CommandFailed."""
    found = Rounds()
    async with _fleet(engine, say) as (fleet, capture), aiohttp.ClientSession() as http:
        await load(http, fleet, requests=WARM_UP, concurrency=4)
        rng = random.Random(SEED)  # noqa: S311  (the order of arms)
        for number in range(rounds):
            for arm in rng.sample((OFF, ON), 2):
                await capture.switch(on=arm == ON)
                for concurrency in CONCURRENCIES:
                    before = await capture.count()
                    values = await load(http, fleet, requests=requests, concurrency=concurrency)
                    found.ttft_ms.setdefault((arm, concurrency), []).append(values)
                    taken = await capture.count() - before
                    found.captured.setdefault(arm, []).append(taken / requests)
            say(f"round {number + 1} of {rounds}")
        await capture.switch(on=True)
    return _report(found, engine, rounds=rounds, requests=requests)


def _report(found: Rounds, engine: Engine, *, rounds: int, requests: int) -> Report:
    conditions: dict[str, Any] = {"engine": engine, "rounds": rounds, "requests_a_round": requests}
    within = True
    for concurrency in CONCURRENCIES:
        apart_ms, spread_ms = found.difference(concurrency)
        conditions[f"difference_ms_at_{concurrency}"] = round(apart_ms, 3)
        conditions[f"spread_ms_at_{concurrency}"] = round(spread_ms, 3)
        within = within and abs(apart_ms) <= spread_ms
    conditions["within_the_spread"] = within
    return Report("capture", [found.arm(OFF), found.arm(ON)], conditions)


@asynccontextmanager
async def _fleet(engine: Engine, say: Any) -> AsyncIterator[tuple[Fleet, Capture]]:
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-capture-") as work_dir:
        arguments = FAST if engine == "sim" else []
        options = FleetOptions(engine=engine, engine_arguments=arguments, work_dir=Path(work_dir))
        async with start_fleet(options, say) as fleet:
            settings = BusSettings(nats=fleet.nats_url)
            bus = await Bus.connect(settings, name=process_name("bench"), incarnation=new_incarnation())
            try:
                yield fleet, Capture(bus)
            finally:
                await bus.close()


def show(report: Report) -> None:
    """For people."""
    report.show([*(f"ttft_ms_at_{count}" for count in CONCURRENCIES), "messages_captured_per_request"])
    for count in CONCURRENCIES:
        apart, spread = (report.conditions[f"{what}_ms_at_{count}"] for what in ("difference", "spread"))
        typer.echo(
            f"{count} at a time: captured takes {apart:+.3f} ms; the rounds of one arm spread by {spread:.3f} ms"
        )
    typer.echo("within the spread" if report.conditions["within_the_spread"] else "NOT within the spread")


def capture(
    engine: Annotated[str, typer.Option(help="sim: light engines that compute in no time; vllm: real ones.")] = "sim",
    rounds: Annotated[int, typer.Option(help="Rounds of both arms.", min=2)] = 24,
    requests: Annotated[int, typer.Option(help="Requests of a round, an arm and a concurrency.", min=4)] = 24,
    quick: Annotated[bool, typer.Option("--quick", help="Ten rounds of 10.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time to first token with the trace capturing everything, and nothing, in turn. Exit code 0 whatever comes out."""
    if engine not in ("sim", "vllm"):
        raise ConfigError(f"--engine must be sim or vllm, not {engine!r}")
    rounds, requests = (10, 10) if quick else (rounds, requests)

    def say(text: str) -> None:
        typer.echo(text, err=True)

    kind: Engine = "sim" if engine == "sim" else "vllm"
    report = asyncio.run(measure(kind, rounds=rounds, requests=requests, say=say))
    if as_json:
        typer.echo(report.json())
    else:
        show(report)


def register_bench(app: typer.Typer) -> None:
    """Add `kvbus bench capture`."""
    app.command("capture")(capture)
