"""`kvbus conformance`: does somebody's router keep the contract?"""

import asyncio
import json
import os
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvbus import process
from kvbus.bus import Bus, BusSettings
from kvbus.conformance.examine import Examiner, figures
from kvbus.conformance.judge import Row
from kvbus.errors import ConfigError
from kvbus.settings import load
from kvbus_schemas import subjects

PLAIN_WIDTH = 200
DEADLINE_MS_MAX = 10_000.0


def conformance(
    guest: Annotated[str, typer.Option(help="Name of the router, as `kvbus router --guest` would be given it.")],
    nats: Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")] = None,
    deadline_ms: Annotated[float, typer.Option(help="Milliseconds that it has for each answer.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Ask a running router everything that kvbus's routers may ask, and say what passes and what fails.

    Exit code 1 when something fails. With restricted access run it as a router that is not running: KVBUS_NAME and
    KVBUS_NKEY_SEED_FILE of one.
    """
    process.configure_logging(os.environ.get(process.LOG_LEVEL_ENV, "error"))
    if not 1.0 <= deadline_ms <= DEADLINE_MS_MAX:
        raise ConfigError(f"--deadline-ms must be between 1 and {DEADLINE_MS_MAX:g}")
    try:
        subjects.token(guest)
    except subjects.SubjectTokenError as error:
        raise ConfigError(str(error)) from None
    rows, speed = asyncio.run(_examined(load(BusSettings, "conformance", {"nats": nats}), guest, deadline_ms))
    if as_json:
        print(json.dumps({"guest": guest, "passed": _passed(rows), "checks": msgspec.to_builtins(rows)} | speed))
    else:
        _show(guest, rows, speed)
    if not _passed(rows):
        raise typer.Exit(1)


async def _examined(settings: BusSettings, guest: str, deadline_ms: float) -> tuple[list[Row], dict[str, float]]:
    bus = await Bus.connect(settings, name=process.process_name("conformance"), incarnation=process.new_incarnation())
    try:
        examiner = Examiner(bus, guest, deadline_ms)
        rows = await examiner.run()
        return rows, figures(examiner.took_ms)
    finally:
        await bus.close()


def _passed(rows: list[Row]) -> bool:
    return all(row.passed for row in rows)


def _show(guest: str, rows: list[Row], speed: dict[str, float]) -> None:
    console = Console() if Console().is_terminal else Console(width=PLAIN_WIDTH)
    table = Table("check", "about", "", "found", "what to do", box=None, pad_edge=False)
    for row in rows:
        verdict = "[green]pass[/]" if row.passed else "[red]FAIL[/]"
        table.add_row(row.check, row.about, verdict, _plain(row.found), _plain(row.advice))
    console.print(table)
    failed = sum(not row.passed for row in rows)
    took = f"; median {speed['median_ms']:g} ms, 99th percentile {speed['p99_ms']:g} ms" if speed else ""
    console.print(f"{guest}: {len(rows) - failed} of {len(rows)} checks passed{took}", highlight=False, markup=False)


def _plain(text: str) -> str:
    """Somebody else's words on our terminal."""
    return "".join(char if char.isprintable() else "?" for char in text).replace("[", "\\[")


def register(app: typer.Typer) -> None:
    """Add `kvbus conformance`."""
    app.command("conformance")(conformance)
