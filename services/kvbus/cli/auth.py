"""`kvbus auth`: keys and permissions for NATS, and API keys for clients."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbus import process
from kvbus.auth import api_keys
from kvbus.auth.conf import TlsFiles
from kvbus.auth.seeds import write_private
from kvbus.auth.setup import OPERATOR, Access, ClientTls, parties_of
from kvbus.bus import Bus, BusSettings
from kvbus.bus.bucket import Storage
from kvbus.errors import CommandFailed, ConfigError
from kvbus.settings import load

auth = typer.Typer(no_args_is_help=True, help="Who may say what on the bus, and whose API keys are taken.")
key = typer.Typer(no_args_is_help=True, help="API keys of clients, hashed at rest.")
auth.add_typer(key, name="key")

KEYS_ENV = "KVBUS_ROUTER_API_KEYS_FILE"
KeysFile = Annotated[Path, typer.Option("--file", envvar=KEYS_ENV, help="The router's setting api_keys_file.")]
DEFAULT_KEYS = Path("api-keys")


@auth.callback()
def _log_to_stderr() -> None:
    process.configure_logging(os.environ.get(process.LOG_LEVEL_ENV, "warning"))


@auth.command("init")
def init(  # one parameter per option
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where seeds, environments and the config go.")],
    engine: Annotated[list[str] | None, typer.Option(help="prefill:ID or decode:ID[:RANKS]; repeatable.")] = None,
    routers: Annotated[int, typer.Option(min=0)] = 1,
    matchers: Annotated[int, typer.Option(min=0)] = 1,
    reuse: Annotated[int, typer.Option(min=0)] = 1,
    observers: Annotated[int, typer.Option(min=0)] = 1,
    guest: Annotated[list[str] | None, typer.Option(help="Name of a router that kvbus's ask; repeatable.")] = None,
    partitions: Annotated[int, typer.Option(min=1, help="Parts that the matchers share.")] = 1,
    own_matcher: Annotated[bool, typer.Option("--own-matcher", help="Prefills pair their own transfers.")] = False,
    at: Annotated[str, typer.Option(help="DIR as the processes will see it, in containers.")] = "",
    tls_cert: Annotated[str, typer.Option(help="nats-server's certificate, as it sees it.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its key.")] = "",
    tls_ca: Annotated[str, typer.Option(help="The authority, as clients see it.")] = "",
    tls_client_ca: Annotated[str, typer.Option(help="Clients must show a certificate of this authority.")] = "",
    tls_client_cert: Annotated[str, typer.Option(help="That certificate, as clients see it.")] = "",
    tls_client_key: Annotated[str, typer.Option(help="Its key.")] = "",
    rotate: Annotated[bool, typer.Option("--rotate", help="Make every seed anew.")] = False,
) -> None:
    """Write a key pair and permissions for each process, and nats-auth.conf to include in nats-server's configuration.

    Seeds that are there stay: name everybody again to add somebody. Then start nats-server with the file, run
    `kvbus auth provision` once, and start each process with the environment in DIR/NAME.env.
    """
    if bool(tls_cert) != bool(tls_key) or (tls_client_ca and not tls_cert):
        raise ConfigError("TLS needs --tls-cert and --tls-key together; --tls-client-ca needs both")
    parties = parties_of(
        engine or (),
        routers=routers,
        matchers=matchers,
        reuse=reuse,
        observers=observers,
        guests=guest or (),
        partitions=partitions,
        own_matcher=own_matcher,
    )
    access = Access(directory, seen_at=at, tls=ClientTls(tls_ca, tls_client_cert, tls_client_key))
    fresh = access.write(parties, TlsFiles(tls_cert, tls_key, tls_client_ca) if tls_cert else None, rotate=rotate)
    print(f"{access.conf}: {len(parties)} users, {len(fresh)} of them with new seeds: include it in nats.conf")
    for name in access.strangers(parties):
        print(f"{access.seed_file(name)}: no longer among the users, NATS refuses it", file=sys.stderr)


@auth.command("provision")
def provision_streams(
    nats: Annotated[str | None, typer.Option(help="NATS URL, or several with commas [nats://127.0.0.1:4222].")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="DIR of `kvbus auth init`.")] = None,
    storage: Annotated[str, typer.Option(help="file or memory.")] = "file",
    replicas: Annotated[int, typer.Option(min=1, max=5, help="nats-servers that keep each stream.")] = 1,
) -> None:
    """Make the streams and buckets, as the operator: nobody else may. What is there already stays."""
    from kvbus.auth.provision import provision

    if storage not in ("file", "memory"):
        raise ConfigError(f"--storage must be file or memory, not {storage!r}")
    kept: Storage = "file" if storage == "file" else "memory"
    flags = {"nats": nats, "nkey_seed_file": str(Access(directory).seed_file(OPERATOR)) if directory else None}
    settings = load(BusSettings, "auth", flags)

    async def make() -> list[str]:
        bus = await Bus.connect(settings, name=OPERATOR, incarnation=process.new_incarnation())
        try:
            return await provision(bus, storage=kept, replicas=replicas)
        finally:
            await bus.close()

    print(f"in place: {', '.join(asyncio.run(make()))}")


@key.command("add")
def add_key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is; a tenant may have several.")],
    file: KeysFile = DEFAULT_KEYS,
) -> None:
    """Make a key, keep its digest, and print the key: it is shown this once."""
    fresh = api_keys.new_key()
    line = api_keys.line_of(tenant, fresh)
    lines = _lines(file)
    write_private(file, "".join(f"{text}\n" for text in (*lines, line)))
    print(fresh)


@key.command("ls")
def list_keys(file: KeysFile = DEFAULT_KEYS) -> None:
    """List the tenants, with the beginning of the digest of each key."""
    for tenant, digest in api_keys.parse("\n".join(_lines(file)), str(file)):
        print(f"{tenant}  {digest.hex()[:8]}")


@key.command("remove")
def remove_keys(
    tenant: Annotated[str, typer.Argument()],
    digest: Annotated[str, typer.Option(help="Only the key whose digest begins so (see ls).")] = "",
    file: KeysFile = DEFAULT_KEYS,
) -> None:
    """Remove a tenant's keys. Routers read the file when they start."""
    beginning = f"{api_keys.checked_tenant(tenant)}:{api_keys.DIGEST_PREFIX}{digest}"
    lines = _lines(file)
    kept = [line for line in lines if not line.startswith(beginning)]
    if len(kept) == len(lines):
        raise CommandFailed(f"{file} has no such key of {tenant!r}")
    write_private(file, "".join(f"{text}\n" for text in kept))
    print(f"removed {len(lines) - len(kept)}")


def _lines(file: Path) -> list[str]:
    """The lines of the file, checked; none where there is no file yet."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    api_keys.parse(text, str(file))
    return text.splitlines()


def register(app: typer.Typer) -> None:
    """Add `kvbus auth`."""
    app.add_typer(auth, name="auth")
