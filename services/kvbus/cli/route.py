"""`kvbus route`: who decides where requests go, switched while routers run."""

import asyncio
import json
import os
from typing import Annotated

import typer

from kvbus import process
from kvbus.bus import Bus, BusSettings
from kvbus.bus.bucket import Bucket
from kvbus.errors import ConfigError
from kvbus.router.canary import CANARY_KEY, CANARY_TTL_MAX_S, Canary, checked, decoded, encoded
from kvbus.settings import load
from kvbus.trace.reader import seconds_of
from kvbus_schemas import subjects

route = typer.Typer(no_args_is_help=True, help="Who decides where requests go, switched while routers run.")

Nats = Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")]


@route.callback()
def _log_to_stderr() -> None:
    process.configure_logging(os.environ.get(process.LOG_LEVEL_ENV, "warning"))


@route.command("canary")
def canary(
    guest: Annotated[str, typer.Option(help="Router on the bus that the share goes to.")] = "",
    policy: Annotated[str, typer.Option(help="Or a policy that is installed beside the routers.")] = "",
    share: Annotated[float | None, typer.Option(help="Share of the requests, 0 to 1.")] = None,
    lasting: Annotated[str, typer.Option("--for", help="It ends by itself after so long: 30m, 12h, 7d.")] = "1d",
    off: Annotated[bool, typer.Option("--off", help="End it now.")] = False,
    nats: Nats = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Send a share of all requests to another router or policy; without options, show what holds.

    All turns of a conversation go the same way, and a greater share keeps those that a smaller one had. All routers
    follow within a moment, without a restart. What the canary cannot decide, the router's own policy does.
    """
    wanted = _wanted(guest, policy, share, off=off)
    ttl_s = seconds_of(lasting)
    if not 1.0 <= ttl_s <= CANARY_TTL_MAX_S:
        raise ConfigError("--for must be between 1s and 30d")
    settings = load(BusSettings, "route", {"nats": nats})

    async def switch() -> tuple[Canary | None, float]:
        bus = await Bus.connect(settings, name=process.process_name("operator"), incarnation=process.new_incarnation())
        try:
            bucket = await bus.bucket(subjects.ROUTING_BUCKET, ttl_hint_s=CANARY_TTL_MAX_S, storage="file")
            if off:
                await bucket.delete(CANARY_KEY)
            elif wanted is not None:
                await bucket.put(CANARY_KEY, encoded(wanted), ttl_s=ttl_s)
            return await _present(bucket)
        finally:
            await bus.close()

    _show(*asyncio.run(switch()), as_json=as_json)


def _wanted(guest: str, policy: str, share: float | None, *, off: bool) -> Canary | None:
    if off and (guest or policy or share is not None):
        raise ConfigError("--off ends the canary: give it alone")
    if not guest and not policy and share is None:
        return None
    if share is None:
        raise ConfigError("say how much: --share 0.1 is every tenth request")
    return checked(Canary(guest=guest, policy=policy, share=share))


async def _present(bucket: Bucket) -> tuple[Canary | None, float]:
    entry = await bucket.get(CANARY_KEY)
    return (None, 0.0) if entry is None else (decoded(entry.value), entry.remaining_s or 0.0)


def _show(present: Canary | None, left_s: float, *, as_json: bool) -> None:
    if as_json:
        given = {"guest": present.guest, "policy": present.policy, "share": present.share} if present else {}
        print(json.dumps(given | {"remaining_s": round(left_s, 1)} if present else {"share": 0.0}))
    elif present is None:
        print("no canary: the routers' own policy or guest decides everything")
    else:
        print(f"{present.share:.1%} of the requests go to {present.name}, for another {left_s / 60:.0f} min")


def register(app: typer.Typer) -> None:
    """Add `kvbus route`."""
    app.add_typer(route, name="route")
