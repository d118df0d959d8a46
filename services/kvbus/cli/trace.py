"""`kvbus trace`: what happened on the bus, request by request, message by message."""

import asyncio
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbus import process
from kvbus.bus import BusSettings
from kvbus.errors import CommandFailed, ConfigError
from kvbus.settings import load
from kvbus.trace import export, render
from kvbus.trace.core import OUTCOMES, AmbiguousIdError, Line, Story, matching, named, stories_of
from kvbus.trace.presence import presence_of
from kvbus.trace.reader import cards_on, follow, lines_of_requests, lines_on, reading, seconds_of
from kvbus_schemas import EngineCard, LoadReported, subjects

PLAIN_WIDTH = 10_000
"""Columns of a line that no terminal shows: nothing is wrapped or cut."""

trace = typer.Typer(no_args_is_help=True, help="What happened on the bus, request by request.")

Nats = Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Since = Annotated[str, typer.Option(help="How far back: 90s, 10m, 2h, 1d.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="A request, transfer or conversation id, or its beginning.")]


@trace.callback()
def _log_to_stderr() -> None:
    process.configure_logging(os.environ.get(process.LOG_LEVEL_ENV, "warning"))


class Format(StrEnum):
    """What `export` writes."""

    JSONL = "jsonl"
    PERFETTO = "perfetto"
    OTLP = "otlp"


@trace.command("ls")
def list_requests(
    *,
    nats: Nats = None,
    since: Since = "1h",
    engine: Annotated[str, typer.Option(help="Only what this engine took part in.")] = "",
    outcome: Annotated[str, typer.Option(help=f"Only these: {', '.join(OUTCOMES)}.")] = "",
    slow: Annotated[float, typer.Option(help="Only what took this many milliseconds to the first byte.")] = 0.0,
    limit: Annotated[int, typer.Option(help="At most so many; 0: all.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List requests, newest first."""
    if outcome and outcome not in OUTCOMES:
        raise ConfigError(f"no request ends {outcome!r}: choose one of {', '.join(OUTCOMES)}")
    stories = matching(_stories(nats, since), engine_id=engine, outcome=outcome, slow_ms=slow, limit=limit)
    if as_json:
        for story in stories:
            print(json.dumps(render.summary(story)))
    else:
        render.show_list(_console(), stories)


@trace.command("show")
def show(name: Id, nats: Nats = None, since: Since = "1d", as_json: AsJson = False) -> None:
    """Show the timeline of a request, a transfer or a conversation, and where its time went."""
    console = _console()
    for number, story in enumerate(_named(nats, since, name)):
        if as_json:
            print(json.dumps(render.details(story)))
            continue
        if number:
            console.print()
        render.show_story(console, story)


@trace.command("why")
def why(name: Id, nats: Nats = None, since: Since = "1d") -> None:
    """Show why a request went where it went: all candidates with their scores, and how old their loads were."""
    for story in _named(nats, since, name):
        render.show_why(_console(), story)


@trace.command("tail")
def tail(
    nats: Nats = None,
    everything: Annotated[bool, typer.Option("--all", help="Loads and cards too.")] = False,
) -> None:
    """Print every message as it happens, until Ctrl-C."""

    def print_line(line: Line) -> None:
        if everything or not isinstance(line.message, LoadReported | EngineCard):
            print(render.live_line(line), flush=True)

    async def main(stopping: asyncio.Event) -> None:
        async with reading(_settings(nats)) as bus:
            await follow(bus, print_line, stopping)

    process.run(main)


@trace.command("export")
def export_trace(
    nats: Nats = None,
    since: Since = "1h",
    form: Annotated[Format, typer.Option("--format", help="Which form.")] = Format.JSONL,
    only: Annotated[str, typer.Option("--id", help="Only this request, transfer or conversation.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")] = None,
) -> None:
    """Write the trace for other tools: JSON lines, Perfetto's viewer (ui.perfetto.dev), OpenTelemetry."""
    if form is Format.JSONL:
        lines, cards = _all(nats, since)
        presence = presence_of(lines, cards)
        if only:
            lines = [line for story in _named(nats, since, only) for line in story.lines]
        _write(out, "".join(f"{text}\n" for text in export.jsonl(lines, presence)))
        return
    stories = _named(nats, since, only) if only else _stories(nats, since)
    document = export.perfetto(stories) if form is Format.PERFETTO else export.otlp(stories)
    _write(out, json.dumps(document) + "\n")


def register(app: typer.Typer) -> None:
    """Add `kvbus trace`."""
    app.add_typer(trace, name="trace")


def _settings(nats: str | None) -> BusSettings:
    return load(BusSettings, "trace", {"nats": nats})


def _stories(nats: str | None, since: str) -> list[Story]:
    async def read() -> list[Line]:
        async with reading(_settings(nats)) as bus:
            return await lines_of_requests(bus, seconds_of(since))

    return stories_of(asyncio.run(read()))


def _all(nats: str | None, since: str) -> tuple[list[Line], list[EngineCard]]:
    async def read() -> tuple[list[Line], list[EngineCard]]:
        async with reading(_settings(nats)) as bus:
            lines = [line async for line in lines_on(bus, subjects.everything(), seconds_of(since))]
            return lines, await cards_on(bus)

    return asyncio.run(read())


def _named(nats: str | None, since: str, name: str) -> list[Story]:
    try:
        found = named(_stories(nats, since), name)
    except AmbiguousIdError as error:
        raise ConfigError(str(error)) from error
    if not found:
        raise CommandFailed(f"nothing in the last {since} is called {name!r}: see kvbus trace ls --since 1d")
    return found


def _write(out: Path | None, text: str) -> None:
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
