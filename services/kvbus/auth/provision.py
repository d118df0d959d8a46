"""What the operator does once: streams and buckets, which no other role may make where access is restricted."""

from kvbus.bus import Bus
from kvbus.bus.bucket import Storage
from kvbus.conversations_client import SECRETS_BUCKET, shared_secret
from kvbus_schemas import subjects

CARD_TTL_S = 6.0
CONVERSATION_TTL_MAX_S = 3600.0
"""As `lifetime_max_s` of reuse."""
ROUTING_TTL_MAX_S = 30 * 86_400.0
"""As the longest canary."""


async def provision(bus: Bus, *, storage: Storage = "file", replicas: int = 1) -> list[str]:
    """Make what is missing; the names of all streams. `bus` is the operator's. Raises BusError.

    All of it is on disk: after a restart of nats-server nobody else could make anew what memory has lost. What is
    there already keeps its settings. The secret of conversation keys is made as well, so that routers only read it.
    """
    await bus.bucket(subjects.ENGINES_BUCKET, ttl_hint_s=CARD_TTL_S, storage=storage, replicas=replicas)
    await bus.bucket(subjects.LEASES_BUCKET, storage=storage, replicas=replicas)
    await bus.bucket(
        subjects.CONVERSATIONS_BUCKET, ttl_hint_s=CONVERSATION_TTL_MAX_S, storage=storage, replicas=replicas
    )
    await bus.bucket(subjects.ROUTING_BUCKET, ttl_hint_s=ROUTING_TTL_MAX_S, storage=storage, replicas=replicas)
    await shared_secret(bus, replicas=replicas)
    buckets = (
        subjects.ENGINES_BUCKET,
        subjects.LEASES_BUCKET,
        subjects.CONVERSATIONS_BUCKET,
        subjects.ROUTING_BUCKET,
        SECRETS_BUCKET,
    )
    return [subjects.TRACE_STREAM, *(f"KV_{name}" for name in buckets)]
