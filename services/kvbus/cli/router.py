"""`kvbus router`: the OpenAI-compatible front door."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="router")(router)


def router(
    nats: Annotated[str | None, typer.Option(help="NATS URL [KVBUS_NATS]")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0 takes a free one [8000]")] = None,
    policy: Annotated[str | None, typer.Option(help="weighed, round_robin, ... (see README), or module:Class")] = None,
    guest: Annotated[str | None, typer.Option(help="router on the bus that decides, by its name [none]")] = None,
    guest_deadline_ms: Annotated[float | None, typer.Option(help="milliseconds to wait for its answer [50]")] = None,
    shadow: Annotated[
        list[str] | None, typer.Option(help="router on the bus to compare with, or `all`; repeatable")
    ] = None,
    static: Annotated[
        list[str] | None, typer.Option(help="stock vLLM engines: prefill=URL,decode=URL; repeatable")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="processes that share the port [1]")] = None,
    reuse: Annotated[bool | None, typer.Option(help="reuse what decode still holds of a conversation [yes]")] = None,
    tenant_header: Annotated[
        str | None, typer.Option(help="header that names the tenant, set by your gateway [the API key]")
    ] = None,
    deadline_s: Annotated[float | None, typer.Option(help="seconds in which a request must be finished")] = None,
    drain_s: Annotated[float | None, typer.Option(help="seconds to finish running answers after SIGTERM")] = None,
) -> None:
    """Serve OpenAI's API and send each request to the engines on the bus. Every setting of the README's list can also
    be given as KVBUS_ROUTER_<NAME> or in the file named by KVBUS_CONFIG."""
    from kvbus import process, settings
    from kvbus.errors import ConfigError

    try:
        from kvbus.router import running
        from kvbus.router.settings import RouterSettings
    except ImportError as error:
        raise ConfigError(f"the router needs {error.name}: pip install 'kvbus[router]'") from error

    flags = {
        "nats": nats,
        "host": host,
        "port": port,
        "policy": policy,
        "guest": guest,
        "guest_deadline_ms": guest_deadline_ms,
        "shadow": tuple(shadow) if shadow else None,
        "static": tuple(static) if static else None,
        "workers": workers,
        "reuse": reuse,
        "tenant_header": tenant_header,
        "deadline_s": deadline_s,
        "drain_s": drain_s,
    }
    process.configure_logging()
    running.run(settings.load(RouterSettings, "router", flags))
