"""`kvbus demo`: everything on one machine, once, with proof."""

import asyncio
import functools
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbus import process
from kvbus.errors import CommandFailed

PLAIN_WIDTH = 160


def register(app: typer.Typer) -> None:
    """Add `kvbus demo`."""
    app.command("demo")(demo)


def demo(
    model: Annotated[str, typer.Option(help="tiny or small: a seeded test model")] = "tiny",
    work_dir: Annotated[Path, typer.Option(help="logs, test models, streams")] = Path(".kvbus/demo"),
) -> None:
    """Two real vLLM engines hand requests over; every token is compared with a plain engine's."""
    process.configure_logging("warning")
    failed: list[str] = []
    process.run(functools.partial(_demo, model, work_dir, failed))
    if failed:
        raise CommandFailed(failed[0])


async def _demo(model: str, work_dir: Path, failed: list[str], stopping: asyncio.Event) -> None:
    work = asyncio.create_task(_show(model, work_dir))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        failed.append("interrupted")
        return
    work.result()


async def _show(model: str, work_dir: Path) -> None:
    from kvbus.local.demo import run_demo
    from kvbus.local.fleet import FleetOptions, start_fleet
    from kvbus.trace.render import show_story

    since_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - since_s:5.1f} s] {text}", flush=True)

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    options = FleetOptions(model=model, work_dir=work_dir, plain=True)
    async with start_fleet(options, say) as fleet:
        stories = await run_demo(fleet, say)
        if not stories:
            raise CommandFailed("the trace has no story of these requests: see `kvbus doctor`")
        print()
        show_story(console, stories[0])
        print()
        say(f"all tokens agree; {len(stories)} transfers; the above is the first. Stopping everything.")
    say("stopped")
