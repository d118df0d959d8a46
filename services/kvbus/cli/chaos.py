"""`kvbus chaos`: faults by seed upon a running fleet under steady load, every token compared."""

import asyncio
import functools
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbus import process
from kvbus.errors import CommandFailed, ConfigError

if TYPE_CHECKING:
    from kvbus.chaos.campaign import Options

QUICK_FAULTS = 30


def register(app: typer.Typer) -> None:
    """Add `kvbus chaos`."""
    app.command("chaos")(chaos)


def chaos(
    *,
    seed: Annotated[int, typer.Option(help="the schedule of faults and the requests are a function of it", min=0)] = 1,
    faults: Annotated[int | None, typer.Option(help="how many [200; with --quick 30]", min=1, max=2000)] = None,
    kinds: Annotated[str, typer.Option(help="all, or some with commas, for example kill,cut")] = "all",
    engine: Annotated[str, typer.Option(help="vllm, or sim: light engines without vLLM")] = "vllm",
    prefill: Annotated[int, typer.Option(help="prefill engines", min=2)] = 2,
    decode: Annotated[int, typer.Option(help="decode engines", min=2)] = 2,
    model: Annotated[str, typer.Option(help="tiny or small: a seeded test model, or what vLLM takes")] = "tiny",
    quick: Annotated[bool, typer.Option("--quick", help="fewer faults with less quiet between them")] = False,
    minutes: Annotated[float, typer.Option(help="no fault begins after so many minutes", min=0.1, max=600)] = 40.0,
    work_dir: Annotated[Path, typer.Option(help="logs, keys, streams")] = Path(".kvbus/chaos"),
    report: Annotated[Path | None, typer.Option(help="write everything that was seen to this file, as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Start a fleet, keep 8 requests at a time going, hurt every part of it, and compare every token with a plain
    engine's. Ctrl-C ends it early, with its report. Exit code 1 when a token was wrong, a request hung, a block was
    lost or a process died of it."""
    if engine not in ("vllm", "sim"):
        raise ConfigError(f"--engine must be vllm or sim, not {engine!r}")
    try:
        from kvbus.chaos.campaign import Options
        from kvbus.chaos.plan import shares_of
    except ImportError as error:
        raise ConfigError(f"kvbus chaos needs {error.name}: pip install 'kvbus[all]'") from error
    chosen = _kinds(kinds)
    count = faults or (QUICK_FAULTS if quick else 200)
    if count < (least := len(shares_of(chosen))):
        raise ConfigError(f"--faults {count} is too few: {kinds} are {least} faults, one upon each sort of process")
    options = Options(
        seed=seed,
        faults=count,
        kinds=chosen,
        engine="vllm" if engine == "vllm" else "sim",
        prefill=prefill,
        decode=decode,
        model=model,
        work_dir=work_dir,
        seconds_max=minutes * 60,
        **(_quick(engine) if quick else {}),
    )
    process.configure_logging("error")
    process.run(functools.partial(_chaos, options, report, as_json))


def _kinds(text: str) -> tuple[str, ...]:
    from kvbus.chaos.plan import KINDS

    chosen = () if text == "all" else tuple(kind.strip() for kind in text.split(","))
    for kind in chosen:
        if kind not in KINDS:
            raise ConfigError(f"--kinds {kind!r}: choose of {', '.join(KINDS)}")
    return chosen


def _quick(engine: str) -> dict[str, Any]:
    """What makes it short."""
    light: dict[str, Any] = {"deadline_s": 40.0, "transfer_deadline_s": 15.0} if engine == "sim" else {}
    return {"quick": True, "gap_s": (0.0, 0.2), "warm_s": 1.0, "scripts": 40, "reuse_ttl_s": 5.0, **light}


async def _chaos(options: "Options", report: Path | None, as_json: bool, stopping: asyncio.Event) -> None:
    from kvbus.chaos.campaign import campaign
    from kvbus.chaos.text import lines_of, report_of, whole

    progress = _Progress()
    result = await campaign(options, progress.say, progress.tick, stopping)
    if report is not None:
        await asyncio.to_thread(report.write_bytes, whole(result))
    print(report_of(result).json() if as_json else "\n".join(lines_of(result)))
    if result.score.broken():
        raise CommandFailed(f"seed {options.seed}: {'; '.join(result.score.broken())}")


class _Progress:
    """Lines, and below them on a terminal how it stands."""

    def __init__(self) -> None:
        self._wide = shutil.get_terminal_size().columns - 1 if sys.stderr.isatty() else 0

    def say(self, text: str) -> None:
        print(f"\r{text:{self._wide}}" if self._wide else text, file=sys.stderr, flush=True)

    def tick(self, text: str) -> None:
        if self._wide:
            print(f"\r{text[: self._wide]:{self._wide}}", end="", file=sys.stderr, flush=True)
