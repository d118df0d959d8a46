"""`kvbus up`: the whole of kvbus on this machine, until Ctrl-C."""

import asyncio
import contextlib
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbus import process
from kvbus.errors import ConfigError

if TYPE_CHECKING:
    from kvbus.local.fleet import FleetOptions


def register(app: typer.Typer) -> None:
    """Add `kvbus up`."""
    app.command("up", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(up)


def up(
    context: typer.Context,
    prefill: Annotated[int, typer.Option(help="prefill engines", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="decode engines", min=1)] = 1,
    model: Annotated[str, typer.Option(help="what vLLM takes, or `tiny` or `small`: a seeded test model")] = "tiny",
    engine: Annotated[str, typer.Option(help="vllm, or sim: light engines without vLLM")] = "vllm",
    port: Annotated[int, typer.Option(help="the router's port; 0 takes a free one")] = 8000,
    nats: Annotated[str, typer.Option(help="an existing NATS; without it one is started")] = "",
    work_dir: Annotated[Path, typer.Option(help="logs, test models, streams")] = Path(".kvbus"),
    secure: Annotated[
        bool, typer.Option("--secure", help="keys and permissions on NATS, one for each process")
    ] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="/metrics on every process, and an observer")] = False,
    console: Annotated[bool, typer.Option("--console", help="a page that shows all of it: kvbus console")] = False,
    console_port: Annotated[int, typer.Option(help="its port; 0 takes a free one")] = 8080,
    json: Annotated[bool, typer.Option("--json", help="print one JSON line when everything is ready")] = False,
) -> None:
    """Start nats-server, matcher, router and engines, and leave them running. Ctrl-C stops all of it.

    Arguments that are not named here go to every `vllm serve`, or `kvbus sim-engine`.
    """
    if engine not in ("vllm", "sim"):
        raise ConfigError(f"--engine must be vllm or sim, not {engine!r}")
    from kvbus.local.fleet import FleetOptions

    options = FleetOptions(
        prefill=prefill,
        decode=decode,
        model=model,
        engine="vllm" if engine == "vllm" else "sim",
        port=port,
        nats=nats,
        work_dir=work_dir,
        secure=secure,
        metrics=metrics,
        console=console,
        console_port=console_port,
        engine_arguments=list(context.args),
    )
    process.configure_logging()
    process.run(functools.partial(_up, options, json))


async def _up(options: "FleetOptions", as_json: bool, stopping: asyncio.Event) -> None:
    running = asyncio.create_task(_run(options, as_json, stopping))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    running.cancel()  # still starting: what runs already is stopped by start_fleet
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _run(options: "FleetOptions", as_json: bool, stopping: asyncio.Event) -> None:
    from kvbus.local.fleet import start_fleet

    async with start_fleet(options, lambda text: print(text, file=sys.stderr)) as fleet:
        if as_json:
            print(fleet.ready_line(), flush=True)
        else:
            print(f"try: curl {fleet.base_url}/v1/models, kvbus trace tail --nats {fleet.nats_url}", file=sys.stderr)
            if fleet.console_url:
                print(f"console: {fleet.console_url}", file=sys.stderr)
            for name, url in sorted(fleet.metrics_urls.items() if fleet.options.metrics else ()):
                print(f"metrics of {name}: {url}", file=sys.stderr)
            if fleet.access.directory is not None:
                print(f"after: set -a; . {fleet.access.directory}/observer.env", file=sys.stderr)
        while True:
            for child in fleet.children():
                child.check()
            await asyncio.sleep(1.0)
