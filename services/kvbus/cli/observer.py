"""`kvbus observer`: counts what no single process can see, for Prometheus."""

import functools
from typing import Annotated

import typer

from kvbus import process
from kvbus.observer.main import serve
from kvbus.observer.settings import ObserverSettings
from kvbus.settings import load


def observer(
    nats: Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics for Prometheus on this port [9464].")] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address of that page [127.0.0.1].")] = None,
) -> None:
    """Read the trace as it grows and serve its metrics until Ctrl-C: TTFT by stage, gaps, dead letters, lag."""
    flags = {"nats": nats, "metrics_port": metrics_port, "metrics_host": metrics_host}
    settings = load(ObserverSettings, "observer", flags).checked()
    process.configure_logging()
    process.run(functools.partial(serve, settings))


def register(app: typer.Typer) -> None:
    """Add `kvbus observer`."""
    app.command("observer")(observer)
