"""Many conversations in a bucket, fast: the very bytes that a reuse process would write, without its round trips."""

import asyncio
import secrets
import time

from kvbus.bus.jetstream import JetStream
from kvbus.bus.link import Link
from kvbus.bus.settings import BusSettings
from kvbus.errors import CommandFailed
from kvbus.reuse.record import Record, encode
from kvbus_schemas import subjects

ENGINE = "decode-bench"
INCARNATION = "bench"
BLOCK_SIZE = 16
LINK_BYTES = 8
LIFETIME_S = 3600.0
BURST = 2_000
"""Writes between two acknowledged ones: a stream drops what comes faster than it can take."""
_ODD = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""Multiplied by it, numbers in a row become keys in no order."""


def key_of(number: int) -> str:
    """The key of a conversation; another for every number, also below zero."""
    return f"{number * _ODD % 2**128:032x}"


async def fill(url: str, count: int, *, tokens: int, max_s: float) -> int:
    """Store conversations 0 to `count`, or as many as there is time for; how many. The bucket must be there."""
    link = await Link.open(BusSettings(nats=url), "bench-fill")
    jetstream, deadline_s, stored = JetStream(link), time.monotonic() + max_s, 0
    headers = {"Nats-TTL": str(int(LIFETIME_S))}
    try:
        while stored < count and time.monotonic() < deadline_s:
            end = min(count, stored + BURST) - 1
            for number in range(stored, end):
                await link.publish(_subject(number), _value(number, tokens), headers)
            await jetstream.put(_subject(end), _value(end, tokens), headers)
            stored = end + 1
            await asyncio.sleep(0)
    finally:
        await link.close()
    return stored


async def count_and_bytes(url: str) -> tuple[int, int]:
    """Conversations in the bucket, and what its stream takes for them."""
    link = await Link.open(BusSettings(nats=url), "bench-count")
    try:
        info = await JetStream(link).info(f"KV_{subjects.CONVERSATIONS_BUCKET}")
    finally:
        await link.close()
    return (0, 0) if info is None else (int(info["state"]["messages"]), int(info["state"]["bytes"]))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process. Raises CommandFailed without psutil."""
    try:
        import psutil
    except ImportError as error:
        raise CommandFailed("kvbus bench reuse weighs nats-server with psutil: pip install psutil") from error
    return int(psutil.Process(pid).memory_info().rss)


def _subject(number: int) -> str:
    return f"$KV.{subjects.CONVERSATIONS_BUCKET}.{key_of(number)}"


def _value(number: int, tokens: int) -> bytes:
    links = -(-tokens // BLOCK_SIZE)
    noise = secrets.token_bytes(links * LINK_BYTES)
    chain = [noise[at : at + LINK_BYTES] for at in range(0, len(noise), LINK_BYTES)]
    record = Record(
        offer_id=f"{INCARNATION}-{number}",
        offer_seq=number + 1,
        engine_id=ENGINE,
        incarnation=INCARNATION,
        token_count=tokens,
        block_size=BLOCK_SIZE,
        chain=chain,
        lifetime_s=LIFETIME_S,
    )
    return encode(record)
