"""The command line. Exit codes: 0 done, 1 the work failed, 2 wrong usage.

Each module here registers one command or one group of commands; what a command does lives in its process's room.
"""

import importlib
import sys

import typer

from kvbus.errors import ConfigError, KvbusError

COMMANDS = (
    "router",
    "route",
    "conformance",
    "matcher",
    "reuse",
    "observer",
    "trace",
    "replay",
    "console",
    "schema",
    "doctor",
    "engine",
    "sim_engine",
    "up",
    "demo",
    "bench",
    "sim",
    "auth",
    "chaos",
)

app = typer.Typer(
    name="kvbus",
    help="The coordination plane for disaggregated vLLM serving: KV-cache hand-offs as messages on NATS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run the command line; turn kvbus's own errors into one line and an exit code."""
    for name in COMMANDS:
        importlib.import_module(f"kvbus.cli.{name}").register(app)
    try:
        app()
    except KvbusError as error:
        print(f"kvbus: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
