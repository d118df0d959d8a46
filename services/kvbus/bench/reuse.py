"""`kvbus bench reuse`: what looking up a conversation costs, from a thousand conversations to a million.

Every size has a nats-server and a `kvbus reuse` of its own, all up together, and takes its turn in every round: a
machine that slows down slows all sizes. Each look-up is one request and reply through the real process, right after a
read of a small bucket on the same server (`floor`), which is what no look-up can beat. Memory is nats-server's RSS.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvbus import process
from kvbus.bench import report
from kvbus.bench.http_load import started
from kvbus.bench.reuse_fill import ENGINE, INCARNATION, count_and_bytes, fill, key_of, rss_bytes
from kvbus.bus import Bucket, Bus, BusSettings
from kvbus.conversations_client import ReuseClient
from kvbus.embedded import EmbeddedNats
from kvbus.errors import CommandFailed
from kvbus.reuse.past import HEARD_KEY
from kvbus_schemas import EngineCard, ReuseAnswered, subjects

READY_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 10.0
CARD_TTL_S = 3600.0
CONCURRENCY = 32
COMMAND = "import typer; from kvbus.cli.reuse import register; app = typer.Typer(); register(app); app()"
"""`kvbus reuse` alone: no other command's imports in what is measured."""
COLUMNS = ("floor_ms", "look_ms", "claim_ms", "miss_ms", "looks_per_s", "rss_bytes_each")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure."""

    sizes: tuple[int, ...]
    """Conversations; the smallest has at least `rounds * asks`, since each is claimed once."""
    rounds: int
    asks: int
    """Look-ups, claims and misses, each, per size and round."""
    tokens: int = 1024
    """Of each conversation: what its digest chain is made of."""
    fill_max_s: float = 240.0
    """Filling stops then; the arm has the size that was reached."""


FULL = Plan(sizes=(1_000, 10_000, 100_000, 1_000_000), rounds=6, asks=150)
QUICK = Plan(sizes=(1_000, 10_000, 50_000), rounds=4, asks=60, fill_max_s=20.0)

Samples = dict[str, list[list[float]]]


class Size:
    """One size: its server, its reuse process, and what was measured on them."""

    def __init__(self, url: str, server_pid: int, bus: Bus, floor: Bucket) -> None:
        self.url = url
        self.server_pid = server_pid
        self.bus = bus
        self.client = ReuseClient(bus)
        self.floor = floor
        self.empty_bytes = 0
        self.count = 0
        self.claimed = 0
        self.samples: Samples = {}

    def keep(self, name: str, values: list[float]) -> None:
        """Add one round's values."""
        self.samples.setdefault(name, []).append(values)

    def weigh(self, name: str) -> None:
        """Note what nats-server takes more than it did when it was empty, per conversation."""
        self.keep(name, [(rss_bytes(self.server_pid) - self.empty_bytes) / self.count])


async def open_size(stack: contextlib.AsyncExitStack, directory: Path, wanted: int, plan: Plan) -> Size:
    """Start, fill, and weigh. Raises CommandFailed when the process does not answer."""
    server = stack.enter_context(EmbeddedNats(store_dir=directory / f"nats-{wanted}"))
    command = [sys.executable, "-c", COMMAND, "--nats", server.url]
    stack.enter_context(started(command, directory / f"reuse-{wanted}.log"))
    bus = await Bus.connect(BusSettings(nats=server.url), name=ENGINE, incarnation=INCARNATION)
    stack.push_async_callback(bus.close)
    size = Size(server.url, server.pid, bus, await bus.bucket(subjects.LEASES_BUCKET))
    stack.push_async_callback(size.client.close)
    await _announce(bus)
    await _until_answered(size)
    size.empty_bytes = rss_bytes(server.pid)
    size.count = await fill(server.url, wanted, tokens=plan.tokens, max_s=plan.fill_max_s)
    stored, on_disk = await count_and_bytes(server.url)
    if stored != size.count or size.count <= plan.rounds * plan.asks:
        raise CommandFailed(f"{stored} of {wanted} conversations were stored in {plan.fill_max_s:.0f} s")
    size.weigh("rss_bytes_each")
    size.keep("stored_bytes_each", [on_disk / size.count])
    return size


async def measure_round(size: Size, plan: Plan) -> None:
    """One turn of a size: floor, look, claim and miss in alternation, then looks in parallel."""
    reserved = plan.rounds * plan.asks
    taken: Samples = {name: [[]] for name in ("floor_ms", "look_ms", "claim_ms", "miss_ms")}
    for _ in range(plan.asks):
        look, claim, unknown = _any_key(reserved, size.count), key_of(size.claimed), key_of(-1 - size.claimed)
        size.claimed += 1
        taken["floor_ms"][0].append(await _ms(lambda: size.floor.get(HEARD_KEY)))
        for name, key, claims, hits in (
            ("look_ms", look, False, True),
            ("claim_ms", claim, True, True),
            ("miss_ms", unknown, True, False),
        ):
            taken[name][0].append(await _ms(partial(_ask, size, key, claims, hits)))
    for name, (values,) in taken.items():
        size.keep(name, values)
    size.keep("look_over_floor", [_median(taken["look_ms"][0]) / _median(taken["floor_ms"][0])])
    size.keep("looks_per_s", [await _looks_per_s(size, reserved, plan.asks * 4)])


async def _looks_per_s(size: Size, reserved: int, asks: int) -> float:
    async def some() -> None:
        for _ in range(asks // CONCURRENCY):
            await _ask(size, _any_key(reserved, size.count), False, True)

    begun_s = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(CONCURRENCY)))
    return asks // CONCURRENCY * CONCURRENCY / (time.perf_counter() - begun_s)


async def _ask(size: Size, key: str, claims: bool, hits: bool) -> ReuseAnswered:
    answer = await size.client.ask(key, ASK_TIMEOUT_S, claim=claims)
    if (answer.grant is not None) != hits:
        raise CommandFailed(f"a look-up in {size.count} conversations came to {answer.miss or 'a grant'}")
    return answer


async def _ms(call: Callable[[], Awaitable[Any]]) -> float:
    begun_s = time.perf_counter()
    await call()
    return (time.perf_counter() - begun_s) * 1e3


def _any_key(first: int, end: int) -> str:
    return key_of(random.randrange(first, end))  # noqa: S311  (which one does not matter)


def _median(values: list[float]) -> float:
    return report.percentile(values, 0.5)


async def _announce(bus: Bus) -> None:
    card = EngineCard(engine_id=ENGINE, role="decode", model="m", http_url="http://-", block_size=16, num_blocks=1)
    cards = await bus.bucket(subjects.ENGINES_BUCKET)
    await cards.put(ENGINE, msgspec.msgpack.encode(bus.envelope(card)), ttl_s=CARD_TTL_S)


async def _until_answered(size: Size) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while (await size.client.ask(key_of(-1), 0.5)).miss == "unavailable":
        if time.monotonic() > deadline_s:
            raise CommandFailed(f"`kvbus reuse --nats {size.url}` did not answer within {READY_TIMEOUT_S:.0f} s")
    while await size.floor.get(HEARD_KEY) is None:  # noqa: ASYNC110  (another process's doing)
        await asyncio.sleep(0.05)


async def measure(plan: Plan, say: Callable[[str], None]) -> report.Report:
    """All sizes, filled one after the other, then measured in turn."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-bench-reuse-")))
        sizes = []
        for wanted in plan.sizes:
            begun_s = time.monotonic()
            sizes.append(await open_size(stack, directory, wanted, plan))
            say(f"{sizes[-1].count:,} conversations stored after {time.monotonic() - begun_s:.0f} s")
        for size in sizes:
            await _looks_per_s(size, 0, CONCURRENCY * 4)  # warm
        for number in range(plan.rounds):
            for size in sizes[:: 1 if number % 2 else -1]:
                await measure_round(size, plan)
            say(f"round {number + 1} of {plan.rounds}")
        for size in sizes:
            size.weigh("rss_bytes_each_at_end")
        return _report(sizes, plan)


def _report(sizes: list[Size], plan: Plan) -> report.Report:
    arms = [
        report.Arm(f"{size.count:,}", {name: report.metric(rounds) for name, rounds in size.samples.items()})
        for size in sizes
    ]
    flat: dict[str, float] = {}
    for name in ("floor_ms", "look_ms", "claim_ms", "miss_ms", "look_over_floor"):
        first, last = sizes[0].samples[name], sizes[-1].samples[name]
        flat[f"{name}_last_over_first"] = _ratio(last, first, report.metric)
        flat[f"{name}_last_over_first_in_best_rounds"] = _ratio(last, first, _best)
    return report.Report(bench="reuse", arms=arms, conditions=msgspec.to_builtins(plan) | flat)


def _best(rounds: list[list[float]]) -> report.Metric:
    """The lowest of the rounds' medians: the round in which others disturbed least."""
    return report.metric([[min(_median(values) for values in rounds)]])


def _ratio(
    last: list[list[float]], first: list[list[float]], summed_up: Callable[[list[list[float]]], report.Metric]
) -> float:
    return round(summed_up(last).p50 / summed_up(first).p50, 3)


def register_bench(bench_app: typer.Typer) -> None:
    """Add `reuse` to the group `kvbus bench`."""

    @bench_app.command(name="reuse")
    def reuse(
        quick: Annotated[bool, typer.Option(help="to 50,000 conversations, under a minute")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """Cost of a conversation's look-up, and memory for each, from a thousand conversations to a million."""
        import uvloop

        process.configure_logging("warning")
        outcome = uvloop.run(measure(QUICK if quick else FULL, lambda text: typer.echo(text, err=True)))
        if as_json:
            typer.echo(outcome.json())
            return
        outcome.show(COLUMNS)
        for name in ("look_ms", "claim_ms", "miss_ms", "floor_ms"):
            p99 = ", ".join(f"{arm.name}: {arm.metrics[name].p99:g}" for arm in outcome.arms)
            typer.echo(f"{name} p99  {p99}")
        for name in ("look_ms", "floor_ms"):
            ratio, best = (outcome.conditions[f"{name}_last_over_first{which}"] for which in ("", "_in_best_rounds"))
            typer.echo(f"{name} largest over smallest: {ratio} in medians, {best} in each size's quietest round")
