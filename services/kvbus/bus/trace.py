"""The trace: the stream that captures every message, how it is set up, and where it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog

from kvbus.bus.client import COPIED
from kvbus.bus.inbound import check_subject
from kvbus.bus.jetstream import NS, JetStream, whole_seconds
from kvbus.bus.settings import BusSettings
from kvbus.errors import BusError
from kvbus_schemas import AnyMessage, UndecodableError, decode, subjects

log = structlog.get_logger(__name__)

MARK_ROOT = "kvbus.mark"
MARK_TIMEOUT_S = 10.0
MARK_POLL_S = 0.002
MARK_TTL_S = 5

LIMITS = {"max_age": "trace_max_age_s", "max_bytes": "trace_max_bytes", "num_replicas": "trace_replicas"}
_DEFAULTS = {name: getattr(BusSettings(), name) for name in LIMITS.values()}
STREAM_NEEDS = ("subjects", "allow_direct", "allow_msg_ttl", "no_ack")


def stream_config(settings: BusSettings) -> dict[str, Any]:
    """The stream's settings. `no_ack` matters: an acknowledging stream would answer every request on the bus before
    its responder does."""
    return {
        "name": subjects.TRACE_STREAM,
        "subjects": [subjects.everything(), f"{MARK_ROOT}.>"],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "num_replicas": settings.trace_replicas,
        "max_age": whole_seconds(settings.trace_max_age_s) * NS,
        "max_bytes": settings.trace_max_bytes,
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "max_msgs_per_subject": -1,
        "no_ack": True,
        "allow_direct": True,
        "allow_msg_ttl": True,
    }


async def ensure_trace(jetstream: JetStream, settings: BusSettings) -> None:
    """The stream is there. Limits that differ from the defaults were asked for, so they are applied to a stream that
    was made with others too; where that is the operator's, it stays as it is. Raises BusError."""
    config = stream_config(settings)
    await jetstream.ensure(config, needs=STREAM_NEEDS)
    asked = {name: config[name] for name, field in LIMITS.items() if getattr(settings, field) != _DEFAULTS[field]}
    found = await jetstream.info(subjects.TRACE_STREAM) if asked else None
    have = found["config"] if found else {}
    if not have or asked.items() <= have.items():
        return
    window = {"duplicate_window": min(have.get("duplicate_window", 0), config["max_age"])}  # never longer than the age
    try:
        await jetstream.api(f"STREAM.UPDATE.{subjects.TRACE_STREAM}", have | window | asked)
        log.info("trace_limits_changed", **{name: value for name, value in asked.items() if have[name] != value})
    except BusError as error:
        log.warning("trace_limits_not_changed", error=str(error), **asked)


async def mark(jetstream: JetStream, owner: str, number: int) -> int:
    """The stream's sequence number now: all that anyone has published so far is at or below it.

    The stream takes messages in after they were delivered, so its own count may be behind. A mark of ours queues up
    like any other message; once it can be read, so can all before it. `number` rises with each mark of `owner`,
    which is one connection.
    """
    subject = f"{MARK_ROOT}.{jetstream.link.name}.{subjects.token(owner)}"
    headers = {"Nats-TTL": str(MARK_TTL_S)}
    try:
        async with asyncio.timeout(MARK_TIMEOUT_S):
            await jetstream.link.publish(subject, str(number).encode(), headers)
            while True:
                stored = await jetstream.last(subjects.TRACE_STREAM, subject)
                if stored is not None and int(stored.data) >= number:
                    return stored.seq
                jetstream.link.denials.check_publish(subject)
                await asyncio.sleep(MARK_POLL_S)
    except TimeoutError:
        raise BusError(f"the stream {subjects.TRACE_STREAM} took in nothing for {MARK_TIMEOUT_S} s") from None


async def replay(
    jetstream: JetStream, subject: str, *, since_seq: int, since_s: float | None, limit: int | None
) -> AsyncIterator[tuple[int, float, str, AnyMessage]]:
    """What the stream holds, as `Bus.replay` describes it."""
    count = 0
    async for stored in jetstream.read(subjects.TRACE_STREAM, subject, after_seq=since_seq, since_s=since_s):
        if limit is not None and count >= limit:
            return
        if COPIED in stored.headers:
            continue  # whoever had it sent here has not said it
        try:
            message = decode(stored.data)
            check_subject(stored.subject, message)
        except UndecodableError:
            continue  # it was a dead letter when it was live
        count += 1
        yield stored.seq, stored.unix_s, stored.subject, message
