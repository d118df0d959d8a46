"""`kvbus replay`: a recording against this version, and against another routing policy."""

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbus.errors import CommandFailed, ConfigError
from kvbus.replay import live, matcher, render, reuse, router
from kvbus.replay.compare import report_of
from kvbus.replay.model import judge
from kvbus.replay.pace import Pace
from kvbus.replay.recording import Recording, read
from kvbus.router import policies
from kvbus.router.basis import GUEST
from kvbus.router.policies import Policy
from kvbus_schemas import RouteDecided


class Against(StrEnum):
    """What decides again."""

    MATCHER = "matcher"
    REUSE = "reuse"
    ROUTER = "router"


def replay(
    file: Annotated[Path, typer.Argument(help="What kvbus trace export --format jsonl has written.")],
    *,
    against: Annotated[Against, typer.Option(help="What decides again.")],
    policy: Annotated[str, typer.Option(help="With router: by name or module:Class; else the recorded.")] = "",
    speed: Annotated[str, typer.Option(help="original, max, or how many times as fast.")] = "max",
    as_live: Annotated[bool, typer.Option("--live", help="A real matcher or reuse process on a scratch bus.")] = False,
    nats: Annotated[str, typer.Option(help="With --live: this scratch bus; else one is started.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Play a recording again and report every decision that differs. Exit code 1 when one does.

    With --policy, tell what that policy would have chosen, and estimate what that would have done.
    """
    if as_live and against is Against.ROUTER:
        raise ConfigError("--live plays to a matcher or a reuse process: use --against matcher or reuse")
    if policy and against is not Against.ROUTER:
        raise ConfigError("--policy is for --against router")
    recording = _read(file)
    if against is Against.ROUTER:
        differing = _ask_policy(recording, policy, as_json=as_json)
    else:
        differing = _decide_again(recording, against, Pace(speed), nats if as_live else None, as_json=as_json)
    if differing and not policy:
        raise typer.Exit(1)


def _read(file: Path) -> Recording:
    try:
        with file.open(encoding="utf-8") as lines:
            return read(lines)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no trace: it is not UTF-8") from error


def _decide_again(recording: Recording, against: Against, pace: Pace, nats: str | None, *, as_json: bool) -> int:
    core = matcher.replay if against is Against.MATCHER else reuse.replay
    if nats is None:
        outcome = core(recording, pace=pace.sleep)
    else:
        outcome = asyncio.run(live.replay(recording, pace, nats, against.value))
    report = report_of(recording, outcome, core)
    if as_json:
        print(json.dumps(render.report_json(recording, report, against)))
    else:
        for line in render.report_lines(recording, report, against):
            print(line)
    return len(report.differences)


def _ask_policy(recording: Recording, name: str, *, as_json: bool) -> int:
    if not any(isinstance(message, RouteDecided) for _, message in recording.said()):
        raise CommandFailed("no routing decision was recorded")

    made: dict[str, Policy] = {}

    def policy_of(decided: RouteDecided) -> Policy | None:
        if name:  # one for each router, whoever has decided there
            return made.setdefault(decided.source, policies.load(name))
        return None if decided.policy.startswith(GUEST) else policies.load(decided.policy)

    report = router.ask(recording, policy_of)
    judged = judge(recording, policies.load(name)) if name else None
    recorded = sorted({answer.asked.decided.policy for answer in report.answers})
    label = name or ", ".join(recorded)
    if as_json:
        print(json.dumps(render.policy_json(recording, report, label, judged)))
    else:
        for line in render.policy_lines(recording, report, label, judged):
            print(line)
        if name and judged is None:
            print("too few answered requests for an estimate")
    return len(report.differences)


def register(app: typer.Typer) -> None:
    """Add `kvbus replay`."""
    app.command("replay")(replay)
