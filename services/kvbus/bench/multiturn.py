"""`kvbus bench multiturn`: the later turns of a conversation, without reuse, with stock bidirectional pull, with kvbus.

A conversation's first prompt is long. Then come turns with prefill's prefix cache on, then turns with it off, as in
the published test: each prompt is the history, the answer and a few new tokens. Two pairs of real engines, one
of them stopped (SIGSTOP); in every round, for every history, the arms take turns with the same prompts.
The client talks to the engines directly, and is the same for every arm.
"""

import asyncio
import datetime
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer

from kvbus.bench.handoff_arms import guarded
from kvbus.bench.handoff_client import Client, prompt_of
from kvbus.bench.handoff_points import warm_up
from kvbus.bench.multiturn_arms import PAIR_OF, Pair, Stage, start_pairs, stop_pairs
from kvbus.bench.multiturn_talk import Talk, Turn
from kvbus.bench.multiturn_text import text_of
from kvbus.bench.report import Arm, Report, deliver, metric, say
from kvbus.engine.launch import platform_problem
from kvbus.engine.model import make_model
from kvbus.errors import CommandFailed, ConfigError

Say = Callable[[str], None]

WARM_TOKENS = 300
WARM_TRIES = 20
TIMEOUT = aiohttp.ClientTimeout(total=300)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    histories: list[int]
    """Tokens before the new ones in the first turn with the prefix cache off."""
    rounds: int
    cached_turns: int = 2
    fresh_turns: int = 3
    new: int = 60
    answer: int = 16
    think_s: float = 0.5
    arms: tuple[str, ...] = tuple(PAIR_OF)

    def first_prompt(self, history: int) -> int:
        """Tokens of the first prompt, so that `history` comes out."""
        return history - self.answer - self.cached_turns * (self.new + self.answer)


FULL = Plan(histories=[500, 1500, 3000, 4000], rounds=3)
QUICK = Plan(histories=[500, 1500], rounds=2, cached_turns=1, fresh_turns=2, think_s=0.3)


class Gathered:
    """Samples of every arm, by metric and round, and the answers that differ."""

    def __init__(self, arms: Sequence[str]) -> None:
        self.rounds: dict[str, dict[str, list[list[float]]]] = {arm: {} for arm in arms}
        self.said: dict[str, list[str]] = {arm: [] for arm in arms}
        self.compared = self.differing = 0
        self._tokens: dict[tuple[int, int], list[list[int]]] = {}

    def add(self, arm: str, history: int, number: int, turns: list[Turn], plan: Plan) -> None:
        """One conversation; the first of `turns` is the one that nothing can be saved on."""
        later = turns[1:]
        halves = {"on": later[: plan.cached_turns], "off": later[plan.cached_turns :]}
        for cache, some in halves.items():
            for name, values in _samples(some).items():
                self.rounds[arm].setdefault(f"{name}_{history}_{cache}", []).append(values)
        self.said[arm] += [turn.said for turn in halves["off"]]
        tokens = [turn.tokens for turn in turns]
        first = self._tokens.setdefault((history, number), tokens)
        if first is not tokens:
            self.compared += len(tokens)
            self.differing += sum(a != b for a, b in zip(first, tokens, strict=True))

    def arms(self) -> list[Arm]:
        return [
            Arm(name, {key: metric(values) for key, values in found.items()}) for name, found in self.rounds.items()
        ]


def _samples(turns: list[Turn]) -> dict[str, list[float]]:
    return {
        "ttft_ms": [turn.ttft_s * 1e3 for turn in turns],
        "ask_ms": [turn.ask_s * 1e3 for turn in turns if turn.ask_s],
        "prompt_tokens": [float(turn.prompt) for turn in turns],
        "computed_tokens": [turn.computed for turn in turns],
        "cached_tokens": [turn.cached for turn in turns],
        "taken_tokens": [turn.taken for turn in turns],
        "received_tokens": [turn.received for turn in turns],
        "cpu_ms_prefill": [turn.cpu_prefill_s * 1e3 for turn in turns],
        "cpu_ms_decode": [turn.cpu_decode_s * 1e3 for turn in turns],
    }


async def run(plan: Plan, work_dir: Path, say: Say) -> Report:
    """Start the engines, measure, stop them. Raises CommandFailed."""
    model, commit = make_model("small", work_dir / "model"), _commit()
    with guarded() as guard:
        since_s = time.monotonic()
        pairs = await start_pairs(plan.arms, model, work_dir, guard)
        say(f"{2 * len(pairs)} engines are up after {time.monotonic() - since_s:.0f} s; measuring")
        since_s = time.monotonic()
        try:
            gathered = await _rounds(plan, Stage(pairs), say)
        except aiohttp.ClientError as error:
            raise CommandFailed(f"an engine did not answer: {error!r}: see the logs in {work_dir}") from error
        finally:
            await stop_pairs(pairs)
        say(f"measured in {time.monotonic() - since_s:.0f} s")
    return Report(bench="multiturn", arms=gathered.arms(), conditions=conditions_of(plan, gathered, commit))


async def _rounds(plan: Plan, stage: Stage, say: Say) -> Gathered:
    gathered, order = Gathered(plan.arms), random.Random(17)  # noqa: S311  (an order of turns)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # an engine that was stopped drops what was open
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as http:
        for number in range(plan.rounds):
            for history in plan.histories:
                for arm in _in_turn(plan.arms, stage, order):
                    pair, resumed = await stage.call(arm)
                    if resumed:
                        await _warm(pair, http)
                    turns = await _converse(plan, Talk(pair, http, arm, think_s=plan.think_s), history, number)
                    gathered.add(arm, history, number, turns, plan)
                    say(f"round {number + 1} of {plan.rounds}, {history} tokens, {arm}: {_short(turns, plan)}")
    return gathered


def _in_turn(arms: Sequence[str], stage: Stage, order: random.Random) -> list[str]:
    """Arms in random order, but those of the pair that runs already come first: each change costs seconds."""
    running = stage.running.spec.name if stage.running is not None else order.choice(sorted(stage.pairs))
    return sorted(order.sample(arms, len(arms)), key=lambda arm: PAIR_OF[arm] != running)


async def _converse(plan: Plan, talk: Talk, history: int, number: int) -> list[Turn]:
    """The whole conversation: the first turn, those with the prefix cache on, those with it off."""
    prompt, turns = prompt_of(f"first-{history}-{number}", plan.first_prompt(history)), []
    try:
        for at in range(1 + plan.cached_turns + plan.fresh_turns):
            turn = await talk.turn(prompt, plan.answer, cache=at <= plan.cached_turns)
            turns.append(turn)
            prompt = prompt + turn.tokens + prompt_of(f"new-{history}-{number}-{at}", plan.new)
    finally:
        await talk.close()
    return turns


async def _warm(pair: Pair, http: aiohttp.ClientSession) -> None:
    """After a pause: until KV goes from prefill to decode, and back. Raises CommandFailed."""
    await warm_up(Client(pair, http))
    plan, arm = Plan(histories=[], rounds=1, cached_turns=0, fresh_turns=1), "stock_bidirectional"
    if pair.spec.legs == "kvbus":
        arm = "kvbus_reuse"
    turns: list[Turn] = []
    for _ in range(WARM_TRIES):
        turns = await _converse(plan, Talk(pair, http, arm, think_s=plan.think_s), WARM_TOKENS, time.monotonic_ns())
        if turns[-1].taken:
            return
    raise CommandFailed(f"{arm}: decode gives nothing back ({turns[-1].said}): see {pair.directory}")


def _short(turns: list[Turn], plan: Plan) -> str:
    fresh = turns[1 + plan.cached_turns :]
    times = " ".join(f"{turn.ttft_s * 1e3:.0f}" for turn in fresh)
    computed = " ".join(f"{turn.computed:.0f}" for turn in fresh)
    return f"prefix cache off: ttft_ms {times}, computed {computed}, {fresh[-1].said if fresh else ''}"


def conditions_of(plan: Plan, gathered: Gathered, commit: str = "unknown") -> dict[str, object]:
    """When, where and what, and what the bars need beside the arms."""
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    ours = gathered.said.get("kvbus_reuse", [])
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "what": (
            f"8-layer model, 32 KB of KV a token, chunks of 256 tokens; {plan.rounds} rounds; each conversation has a "
            f"first turn, {plan.cached_turns} with the prefix cache on, {plan.fresh_turns} with it off, each with "
            f"{plan.new} new tokens and {plan.answer} of answer"
        ),
        "load_average": load,
        "histories": plan.histories,
        "new": plan.new,
        "rounds": plan.rounds,
        "compared_answers": gathered.compared,
        "differing_answers": gathered.differing,
        "later_turns_cache_off": len(ours),
        "reused": sum(said.startswith("hit") for said in ours),
        "not_reused": sorted({said for said in ours if not said.startswith("hit")}),
    }


def _commit() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603
    except (subprocess.SubprocessError, OSError):
        return "unknown"


def _plan(quick: bool, rounds: int | None, histories: str) -> Plan:
    plan = QUICK if quick else FULL
    if rounds is not None:
        plan = msgspec.structs.replace(plan, rounds=rounds)
    if histories:
        try:
            plan = msgspec.structs.replace(plan, histories=sorted(int(one) for one in histories.split(",")))
        except ValueError:
            raise ConfigError(f"--histories must be numbers with commas, not {histories!r}") from None
    least, most = plan.first_prompt(0) * -1 + 1, 4500
    for history in plan.histories:
        if not least <= history <= most:
            raise ConfigError(f"a history of {history} tokens cannot be measured: {least} to {most} can")
    return plan


def register_bench(bench_app: typer.Typer) -> None:
    """Add `multiturn` to the group `kvbus bench`."""

    @bench_app.command(name="multiturn")
    def multiturn(
        quick: Annotated[bool, typer.Option(help="two histories, under a minute or two once engines are up")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
        rounds: Annotated[int | None, typer.Option(min=1, help="conversations of every arm at every history")] = None,
        histories: Annotated[str, typer.Option(help="tokens of history, with commas")] = "",
        out: Annotated[Path | None, typer.Option(help="also write the report to this file")] = None,
        work_dir: Annotated[Path | None, typer.Option(help="keep logs and the model here")] = None,
    ) -> None:
        """Later turns of a conversation on real vLLM: no reuse, stock bidirectional pull, kvbus's reuse and push."""
        problem = platform_problem()
        if problem:
            raise ConfigError(problem)
        plan = _plan(quick, rounds, histories)
        with tempfile.TemporaryDirectory(prefix="kvbus-multiturn-") as temporary:
            report = asyncio.run(run(plan, work_dir or Path(temporary), say))
        deliver(report, text_of, as_json=as_json, out=out)
