"""`kvbus reuse`: remembers who holds which conversation. Start as many as you like; they share the work."""

import functools
import os
from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from kvbus import process
from kvbus.engine.settings import EngineSettings
from kvbus.reuse.main import serve
from kvbus.reuse.settings import ReuseSettings
from kvbus.router.settings import RouterSettings
from kvbus.settings import load

PREFIX = "KVBUS_REUSE_"
OTHERS = ("reuse_secret",)
"""Read by routers from the environment, beside the settings of theirs and of engines that begin with `reuse_`."""


def reuse(
    nats: Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Offers of fewer tokens are let go at once [64].")] = None,
    storage: Annotated[str | None, typer.Option(help="file or memory, when the bucket is made [file].")] = None,
    replicas: Annotated[int | None, typer.Option(help="nats-servers that keep each conversation [1].")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics for Prometheus on this port.")] = None,
) -> None:
    """Run a reuse process until Ctrl-C. Conversations live in JetStream and survive any restart."""
    flags = {
        "nats": nats,
        "min_tokens": min_tokens,
        "storage": storage,
        "replicas": replicas,
        "metrics_port": metrics_port,
    }
    settings = load(ReuseSettings, "reuse", flags, own_environ(os.environ)).checked()
    process.configure_logging()
    process.run(functools.partial(serve, settings))


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what is for routers and engines: `KVBUS_REUSE_TTL_S` is the engine's `reuse_ttl_s`, so that one
    environment may serve all processes."""
    fields = (*msgspec.structs.fields(EngineSettings), *msgspec.structs.fields(RouterSettings))
    theirs = {name.upper() for name in (*OTHERS, *(field.name for field in fields)) if name.startswith("reuse_")}
    ours = {f"REUSE_{field.name.upper()}" for field in msgspec.structs.fields(ReuseSettings)}
    hidden = {f"KVBUS_{name}" for name in theirs - ours}
    return {name: value for name, value in environ.items() if name not in hidden}


def register(app: typer.Typer) -> None:
    """Add `kvbus reuse`."""
    app.command("reuse")(reuse)
