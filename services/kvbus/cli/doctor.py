"""`kvbus doctor`: is everything here that kvbus needs?"""

import asyncio
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvbus.doctor import Check, examine

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor")(doctor)


def doctor(
    nats: Annotated[
        str | None,
        typer.Option(help="NATS to examine; without it one is started for the check.", envvar="KVBUS_NATS"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Check NATS, JetStream, versions and NIXL, and say what to do about each. Exit code 1 when a check fails."""
    checks = asyncio.run(examine(nats))
    failed = any(check.verdict == "fail" for check in checks)
    if as_json:
        print(msgspec.json.encode({"ok": not failed, "checks": checks}).decode())
    elif sys.stdout.isatty():
        Console().print(_table(checks))
    else:
        for check in checks:
            print(_line(check))
    if failed:
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    table = Table(title="kvbus doctor")
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        style = _STYLES[check.verdict]
        table.add_row(f"[{style}]{check.verdict}[/]", check.name, check.found, check.advice)
    return table


def _line(check: Check) -> str:
    return f"{check.verdict:4}  {check.name}: {check.found}" + (f"  -> {check.advice}" if check.advice else "")
