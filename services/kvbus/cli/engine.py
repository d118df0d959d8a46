"""`kvbus engine prefill|decode MODEL [vllm arguments]`."""

import asyncio
import functools
import os
import sys
from typing import Annotated

import typer

from kvbus import process
from kvbus.engine.launch import EngineOptions, platform_problem
from kvbus.errors import ConfigError

HELP = "Run one vLLM server that takes part on the bus. Arguments that are not named here go to `vllm serve`."


def register(app: typer.Typer) -> None:
    """Add `kvbus engine`."""
    app.command("engine", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, help=HELP)(
        engine
    )


def engine(
    context: typer.Context,
    role: Annotated[str, typer.Argument(help="prefill or decode")],
    model: Annotated[str, typer.Argument(help="what `vllm serve` takes: a name or a directory")],
    nats: Annotated[str | None, typer.Option(help="NATS URL [KVBUS_NATS, nats://127.0.0.1:4222]")] = None,
    engine_id: Annotated[str | None, typer.Option(help="stable name, unique on the bus [ROLE-<port>]")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    advertise: Annotated[str, typer.Option(help="URL for routers, when it is not http://HOST:PORT")] = "",
    drain_s: Annotated[float, typer.Option(help="seconds to finish running requests after SIGTERM")] = 30.0,
) -> None:
    """Run one engine until it ends or is stopped."""
    if role not in ("prefill", "decode"):
        raise ConfigError(f"role must be prefill or decode, not {role!r}")
    problem = platform_problem()
    if problem:
        raise ConfigError(problem)
    options = EngineOptions(
        role="prefill" if role == "prefill" else "decode",
        model=model,
        engine_id=engine_id or f"{role}-{port}",
        incarnation=process.new_incarnation(),
        host=host,
        port=port,
        nats=nats or os.environ.get("KVBUS_NATS", "nats://127.0.0.1:4222"),
        advertise=advertise,
        arguments=list(context.args),
    )
    process.configure_logging()
    code = [0]
    process.run(functools.partial(_serve, options, drain_s, code))
    sys.exit(code[0])


async def _serve(options: EngineOptions, drain_s: float, code: list[int], stopping: asyncio.Event) -> None:
    from kvbus.engine.serve import serve

    code[0] = await serve(options, drain_s, stopping)
