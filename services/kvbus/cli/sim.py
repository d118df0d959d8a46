"""`kvbus sim`: the production cores in a simulated world that does its worst; a seed reproduces a run exactly."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvbus.errors import CommandFailed, ConfigError

if TYPE_CHECKING:
    from kvbus.sim.hunt import Finding, Hunt, Protocol, World
    from kvbus.sim.run import Result

PROTOCOLS = ("kvbus", "stock")
WORLDS = ("all", "push", "reuse")
TOLD_MAX = 20
"""Findings that are said while the search goes on."""
PROGRESS_S = 15.0
"""Between two lines of progress where there is no terminal."""


def sim(
    *,
    seed: Annotated[int | None, typer.Option(help="Run this seed and tell the story of what went wrong.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Without --seed: so many seeds.")] = 10_000,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Stop after so many seconds; 0: never.")] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 1,
    faults: Annotated[str, typer.Option(help="all, none, or kinds with commas, for example crash,loss.")] = "all",
    protocol: Annotated[str, typer.Option(help="kvbus, or stock: a model of vLLM's own push protocol.")] = "kvbus",
    world: Annotated[
        str, typer.Option(help="push, reuse (conversations, several prompts), or all: every third seed is reuse.")
    ] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Search for a broken rule in simulated runs. Exit code 1 when one was found. Ctrl-C sums up what was run."""
    from kvbus.sim.hunt import faults_of, hunt, runner_of

    if protocol not in PROTOCOLS:
        raise ConfigError(f"unknown protocol {protocol!r}: choose kvbus or stock")
    chosen: Protocol = "stock" if protocol == "stock" else "kvbus"
    if world not in WORLDS:
        raise ConfigError(f"unknown world {world!r}: choose all, push or reuse")
    where: World = "push" if world == "push" else "reuse" if world == "reuse" else "all"
    kinds = faults_of(faults)
    if seed is not None:
        _tell(runner_of(chosen, where)(seed, kinds, tell=True), as_json=as_json)
        return
    total = _watched(hunt(chosen, kinds, first=first, runs=runs, seconds=seconds, jobs=jobs, world=where))
    if total is None:
        raise CommandFailed("stopped before the first runs were over")
    _sum_up(total, chosen, f"--world {world} --faults {faults}", as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add `kvbus sim`."""
    app.command("sim")(sim)


def _watched(totals: "Iterator[Hunt]") -> "Hunt | None":
    """The last of the sums, also when the user or a supervisor stops the search; progress goes to stderr."""
    total: Hunt | None = None
    said_s, told = time.monotonic(), set[int]()
    stop = _Stop()
    for total in totals:
        line = f"{total.runs} runs, {total.broken} broke a rule, {total.seconds:.0f} s"
        if sys.stderr.isatty():
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            print(line, file=sys.stderr, flush=True)
        for finding in _new_in(total, told):
            print(f"seed {finding.seed} breaks rule {finding.rule}: {finding.text}", file=sys.stderr, flush=True)
        if stop.wanted:
            print("\nstopped", file=sys.stderr)
            break
    return total


class _Stop:
    """Set by the first signal, also where a shell has started us with SIGINT ignored. An exception of the handler could
    be lost in a destructor of the simulated world; the next batch is a second away."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.wanted = True


def _tell(result: "Result", *, as_json: bool) -> None:
    about = {violation.transfer_id for violation in result.violations} - {""}
    lines = [line for line in result.story if not about or line.about in about or not line.about]
    if as_json:
        broken = [violation._asdict() for violation in result.violations]
        print(json.dumps({"seed": result.seed, "broken": broken, "story": [line._asdict() for line in lines]}))
    else:
        for line in lines:
            print(f"{line.at_s:10.4f} s  {line.who:18} {line.about[-4:]:4} {line.what}")
        for violation in result.violations:
            print(f"rule {violation.rule} broken at {violation.at_s:.4f} s: {violation.text}")
    if result.violations:
        raise CommandFailed(f"seed {result.seed} breaks a rule")
    if not as_json:
        print(f"seed {result.seed}: every rule held, {result.events} events")


def _new_in(total: "Hunt", told: set[int]) -> "list[Finding]":
    """Findings of seeds that are not in `told`, which takes them in; the first few, since a bad day has thousands."""
    found, room = [one for findings in total.found.values() for one in findings if one.seed not in told], len(told)
    told.update(finding.seed for finding in found)
    return found[: max(0, TOLD_MAX - room)]


def _sum_up(total: "Hunt", protocol: str, where: str, *, as_json: bool) -> None:
    from kvbus.sim.stock_run import STOCK_FAULTS

    if as_json:
        print(json.dumps(total.to_json()))
    else:
        rate = total.runs / max(total.seconds, 1e-9)
        print(f"{total.runs} runs ({rate:.0f} a second), {total.events} events, {total.broken} broke a rule")
        print(", ".join(f"{count} {what}" for what, count in sorted(total.counts.items())))
        for rule, findings in sorted(total.found.items()):
            seeds = ", ".join(str(finding.seed) for finding in findings[:10])
            print(f"rule {rule}: seeds {seeds}: {findings[0].text}")
        if protocol == "stock" and (missing := [what for what in STOCK_FAULTS.values() if what not in total.found]):
            print(f"not found: {', '.join(missing)}")
        if total.found:
            print(f"see one: kvbus sim --seed N --protocol {protocol} {where}")
    if total.broken:
        raise CommandFailed(f"{total.broken} of {total.runs} runs broke a rule")
