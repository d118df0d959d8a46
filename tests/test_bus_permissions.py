"""Permissions and accounts: NATS drops what is not allowed; here that is an error, and soon."""

import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.bus import Bus, BusSettings, DeniedError
from kvbus.embedded import EmbeddedNats
from kvbus.errors import BusError
from kvbus_schemas import BlocksUnavailable, ReuseAsked, subjects

pytestmark = pytest.mark.nats

PERMISSIONS = """
authorization {
  users = [
    { user: open, password: pw }
    { user: bound, password: pw, permissions: {
        publish: ["kvbus.v1.*.*.bound.>", "kvbus.mark.>", "kvbus.dead.bound", "$JS.API.>", "_INBOX_*.>"]
        subscribe: ["kvbus.v1.*.*.*.bound.*", "_INBOX_bound.>"] } }
  ]
}
"""


def fact(transfer_id: str, detail: str = "") -> BlocksUnavailable:
    return BlocksUnavailable(transfer_id=transfer_id, producer_id="p1", reason="failed", detail=detail)


def fresh() -> str:
    return secrets.token_hex(16)


@pytest.fixture
async def bound(tmp_path: Path) -> AsyncIterator[tuple[EmbeddedNats, Bus]]:
    """A server with permissions, and a process that may only speak as `bound`."""
    config = tmp_path / "permissions.conf"
    config.write_text(PERMISSIONS)
    with EmbeddedNats(config_file=config) as server:
        owner = await Bus.connect(BusSettings(nats=as_user(server, "open")), name="owner", incarnation="i")
        bus = await Bus.connect(BusSettings(nats=as_user(server, "bound")), name="bound", incarnation="i")
        yield server, bus
        await bus.close()
        await owner.close()


def as_user(server: EmbeddedNats, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:pw@")


async def test_speaking_in_anothers_name_is_an_error_within_a_second(bound: tuple[EmbeddedNats, Bus]) -> None:
    server, _ = bound
    thief = await Bus.connect(BusSettings(nats=as_user(server, "bound")), name="bound", incarnation="j")
    thief.name = "owner"
    started_s = time.monotonic()
    await thief.publish(fact(fresh()), "m")
    with pytest.raises(DeniedError, match=r"publish to 'kvbus\.v1\.transfer\.blocks_unavailable\.owner"):
        await thief.barrier()
    with pytest.raises(DeniedError):
        await thief.publish(fact(fresh()), "m")
    with pytest.raises(DeniedError):
        await thief.request(ReuseAsked(conversation=fresh()), "reuse", timeout_s=5)
    assert time.monotonic() - started_s < 1
    assert thief.counters.permission_errors == 2
    assert "permissions violation" in thief.last_error.lower()
    await thief.close()


async def test_a_denied_subscription_and_a_denied_bucket_are_errors_within_a_second(
    bound: tuple[EmbeddedNats, Bus],
) -> None:
    _, bus = bound
    started_s = time.monotonic()
    with pytest.raises(DeniedError, match="subscribe to 'kvbus"):
        await bus.subscribe(subjects.everything(), lambda message: None)
    bucket = await bus.bucket("denied")
    with pytest.raises(DeniedError, match=r"\$KV\.denied\.k"):
        await bucket.put("k", b"v", ttl_s=5)
    assert time.monotonic() - started_s < 1
    await bus.publish(fact(fresh()), "m")
    await bus.barrier()


async def test_wrong_credentials_are_named_when_connecting(bound: tuple[EmbeddedNats, Bus]) -> None:
    url = as_user(bound[0], "stranger")
    with pytest.raises(BusError, match=r"(?i)authorization"):
        await Bus.connect(BusSettings(nats=url, connect_timeout_s=1), name="x", incarnation="i")


async def test_without_jetstream_the_error_says_how_to_enable_it(tmp_path: Path) -> None:
    config = tmp_path / "accounts.conf"
    config.write_text("accounts { PLAIN { users = [{user: a, password: b}] } }\nno_auth_user: a\n")
    with EmbeddedNats(config_file=config) as server:
        started_s = time.monotonic()
        with pytest.raises(BusError, match=r"(?i)jetstream.*-js"):
            await Bus.connect(BusSettings(nats=server.url), name="x", incarnation="i")
        assert time.monotonic() - started_s < 8
