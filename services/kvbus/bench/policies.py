"""`kvbus bench policies`: what a choice costs inside the router, by policy, by engines and by length of the prompt.

Two things are timed, each alone, in one process, with the production classes: the policy's answer to a question that is
ready, and the look at a prompt (its digests, the known beginnings, who holds them) that goes before it. The prompts are
known to the index up to their end, which is the dearest case: a look stops at the first beginning that nobody knows.
"""

import datetime
import os
import platform
import random
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from kvbus.bench.report import Arm, Metric, Report, metric
from kvbus.errors import CommandFailed
from kvbus.router.cache_heads import Heads
from kvbus.router.cache_index import CacheIndex
from kvbus.router.cache_prompt import prompt_of
from kvbus.router.policies import Policy, RouteQuestion, load
from kvbus_schemas import BlocksStored, EngineView, PromptHashed, Role

POLICIES = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "prefix_aware", "weighed")
ENGINES = (2, 10, 100)
PROMPT_TOKENS = (1_000, 10_000, 100_000)
CHOICE_MAX_US = 50.0
"""A choice among 100 engines (issue 5, sentence 6)."""
PROMPT_MAX_US = 500.0
"""A prompt of 100k tokens, the choice included."""
TEXT_BYTES = 4
"""Of a token of text."""
BLOCK_SIZE = 16
ROUNDS, QUICK_ROUNDS = 15, 5
CALLS, QUICK_CALLS = 400, 100
SECRET = b"bench"
WARM_UP = 50


class Plan(msgspec.Struct, frozen=True):
    rounds: int = ROUNDS
    calls: int = CALLS


def run(plan: Plan) -> Report:
    """Time everything, in rounds, so that a busy moment falls on all arms alike."""
    policies = {name: load(name) for name in POLICIES}
    questions = {count: question(count) for count in ENGINES}
    looks = {tokens: look(tokens, max(ENGINES)) for tokens in PROMPT_TOKENS}
    times: dict[str, dict[str, list[list[float]]]] = {name: {} for name in POLICIES}
    for _ in range(plan.rounds):
        for name, policy in policies.items():
            for count, asked in questions.items():
                taken = timed(_choosing(policy, asked), plan.calls)
                times[name].setdefault(f"choice_us_{count}", []).append(taken)
            for tokens, looked in looks.items():
                taken = timed(_looking(policy, looked, questions[max(ENGINES)]), max(10, plan.calls // 10))
                times[name].setdefault(f"prompt_us_{tokens}", []).append(taken)
    arms = [Arm(name, {what: metric(rounds) for what, rounds in of.items()}) for name, of in times.items()]
    return Report(bench="policies", arms=arms, conditions=_conditions(plan))


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of each call."""
    for _ in range(min(WARM_UP, calls)):
        call()
    taken = []
    for _ in range(calls):
        started_ns = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - started_ns) / 1e3)
    return taken


def _choosing(policy: Policy, asked: RouteQuestion) -> Callable[[], object]:
    return lambda: policy.choose(asked)


def _looking(policy: Policy, looked: Callable[[], object], asked: RouteQuestion) -> Callable[[], object]:
    def both() -> object:
        looked()
        return policy.choose(asked)

    return both


def question(count: int) -> RouteQuestion:
    """Half of the engines prefill, half decode, each with a load of its own."""
    chance = random.Random(count)  # noqa: S311  (reproducible)
    half = max(1, count // 2)
    return RouteQuestion(
        request_id="bench",
        model="m",
        prompt_bytes=40_000,
        prompt_tokens=10_000,
        prefills=[_view("prefill", number, chance) for number in range(half)],
        decodes=[_view("decode", number, chance) for number in range(half)],
        conversation="0123456789abcdef0123456789abcdef",
        head="0123456789abcdef",
    )


def _view(role: Role, number: int, chance: random.Random) -> EngineView:
    return EngineView(
        engine_id=f"{role}-{number}",
        role=role,
        running=chance.randrange(20),
        waiting=chance.randrange(4),
        free_blocks=chance.randrange(200, 10_000),
        total_blocks=10_000,
        load_age_ms=chance.random() * 500,
        hit_tokens=chance.randrange(10_000),
        queued_tokens=chance.randrange(1, 50_000),
        cache="exact",
    )


def look(tokens: int, engines: int) -> Callable[[], object]:
    """The router's look at a prompt of so many tokens, known to its end and held by every engine to another depth."""
    chance = random.Random(tokens)  # noqa: S311  (reproducible)
    text = msgspec.json.encode(chance.randbytes(tokens * TEXT_BYTES // 2).hex())
    members = {"prompt": msgspec.Raw(text)}
    heads, index = Heads(100_000), CacheIndex(2_000_000)
    names = [number.to_bytes(8, "big") for number in range(tokens // BLOCK_SIZE)]
    ends = list(range(1, len(names) + 1))
    known = prompt_of(members, "m", SECRET)
    assert known is not None
    hashed = PromptHashed(
        engine_id="e", transfer_id="t", token_count=tokens, block_size=BLOCK_SIZE, ends=ends, block_hashes=names
    )
    heads.learn(known, hashed)
    index.follow({f"engine-{number}": "" for number in range(engines)})
    for number in range(engines):
        held = names[: len(names) * (number + 1) // engines]
        stored = BlocksStored(engine_id=f"engine-{number}", event_seq=1, block_hashes=held, block_size=BLOCK_SIZE)
        index.receive(stored)

    def once() -> object:
        prompt = prompt_of(members, "m", SECRET)
        assert prompt is not None
        return index.hits(heads.known(prompt)), prompt.head

    return once


def bars(report: Report) -> list[tuple[str, float, float]]:
    """(what, microseconds at the median, at most)."""
    found = []
    for arm in report.arms:
        found.append((f"{arm.name}, {ENGINES[-1]} engines", _p50(arm, f"choice_us_{ENGINES[-1]}"), CHOICE_MAX_US))
        name = f"prompt_us_{PROMPT_TOKENS[-1]}"
        found.append((f"{arm.name}, {PROMPT_TOKENS[-1]} tokens", _p50(arm, name), PROMPT_MAX_US))
    return found


def _p50(arm: Arm, name: str) -> float:
    found: Metric = arm.metrics[name]
    return found.p50


def _conditions(plan: Plan) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": "/".join(f"{value:.1f}" for value in os.getloadavg()),
        "rounds": plan.rounds,
        "calls": plan.calls,
        "choice_max_us": CHOICE_MAX_US,
        "prompt_max_us": PROMPT_MAX_US,
    }


def register_bench(bench_app: typer.Typer) -> None:
    """Add `policies` to the group `kvbus bench`."""

    @bench_app.command(name="policies")
    def policies(
        quick: Annotated[bool, typer.Option(help="fewer rounds")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    ) -> None:
        """What a routing decision costs in the router, in microseconds. Exit code 1 when a bar is not met."""
        report = run(Plan(QUICK_ROUNDS, QUICK_CALLS) if quick else Plan())
        if as_json:
            typer.echo(report.json())
        else:
            report.show([f"choice_us_{count}" for count in ENGINES] + [f"prompt_us_{n}" for n in PROMPT_TOKENS])
            for what, took, at_most in bars(report):
                typer.echo(f"{'met    ' if took <= at_most else 'NOT MET'}  {what}: {took:g} us, at most {at_most:g}")
        missed = sum(took > at_most for _, took, at_most in bars(report))
        if missed:
            raise CommandFailed(f"{missed} bars are not met: on a busy machine try again")
