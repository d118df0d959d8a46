"""`kvbus matcher`: pairs registrations with producers. Start two, and one stands by."""

import functools
from typing import Annotated

import typer

from kvbus import process
from kvbus.matcher.main import serve
from kvbus.matcher.settings import MatcherSettings
from kvbus.settings import load


def matcher(
    nats: Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")] = None,
    partition: Annotated[str | None, typer.Option(help="For example 0/4: the first of four, by producer.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics for Prometheus on this port.")] = None,
) -> None:
    """Run a matcher until Ctrl-C. A second one on the same bus stands by and takes over within 3 s."""
    flags = {"nats": nats, "partition": partition, "metrics_port": metrics_port}
    settings = load(MatcherSettings, "matcher", flags).checked()
    process.configure_logging()
    process.run(functools.partial(serve, settings))


def register(app: typer.Typer) -> None:
    """Add `kvbus matcher`."""
    app.command("matcher")(matcher)
