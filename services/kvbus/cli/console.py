"""`kvbus console`: a page to look at the bus."""

import functools
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `kvbus console`."""
    app.command("console")(console)


def console(
    nats: Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222]")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0 takes a free one [8080]")] = None,
) -> None:
    """Serve one page with engines, load, running transfers, where their time went and why they went where they went.

    Read-only, live over the bus; there is no login, so listen only where everybody may look.
    """
    from kvbus import process, settings
    from kvbus.console.settings import ConsoleSettings
    from kvbus.errors import ConfigError

    try:
        from kvbus.console.main import serve
    except ImportError as error:
        raise ConfigError(f"the console needs {error.name}: pip install 'kvbus[router]'") from error
    flags = {"nats": nats, "host": host, "port": port}
    process.configure_logging()
    process.run(functools.partial(serve, settings.load(ConsoleSettings, "console", flags)))
