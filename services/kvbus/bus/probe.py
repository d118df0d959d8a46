"""What `kvbus doctor` asks of NATS."""

import contextlib
import secrets
from dataclasses import dataclass

from kvbus.bus.bus import Bus
from kvbus.bus.link import Link
from kvbus.bus.settings import BusSettings
from kvbus.errors import BusError

PROBE_BUCKET = "kvbus_doctor"
PROBE_TTL_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a nats-server says of itself. `max_payload` is in bytes."""

    version: str
    max_payload: int


async def probe_server(settings: BusSettings) -> ServerFacts:
    """Connect, ask and leave. Raises BusError."""
    link = await Link.open(settings, "doctor")
    try:
        return ServerFacts(link.server_version, link.server_max_payload)
    finally:
        await link.close()


async def probe_bucket(bus: Bus) -> None:
    """Make a bucket, write, read, compare-and-delete, remove the bucket. Raises BusError at what is not allowed."""
    bucket = await bus.bucket(PROBE_BUCKET, ttl_hint_s=PROBE_TTL_S)
    try:
        key = f"probe.{secrets.token_hex(4)}"
        revision = await bucket.create(key, b"probe", ttl_s=PROBE_TTL_S)
        if await bucket.get(key) is None:
            raise BusError(f"a key that was just written to bucket {PROBE_BUCKET} cannot be read")
        await bucket.delete(key, revision=revision)
    finally:
        with contextlib.suppress(BusError):
            await bus.remove_bucket(PROBE_BUCKET)
