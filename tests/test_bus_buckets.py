"""Buckets on a real nats-server: claims, revisions, listings, watches."""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvbus.bus import (
    Bus,
    BusSettings,
    KeyExistsError,
    RevisionError,
)
from kvbus.bus.bucket import bucket_config
from kvbus.bus.errors import JetStreamError
from kvbus.bus.jetstream import NS
from kvbus.embedded import EmbeddedNats

pytestmark = pytest.mark.nats


def fresh() -> str:
    return secrets.token_hex(16)


async def until(holds: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait until `holds()`, for at most `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  (what is awaited is another process's doing)
            await asyncio.sleep(0.005)


@pytest.fixture
async def other(nats_server: EmbeddedNats) -> AsyncIterator[Bus]:
    """A second process."""
    connected = await Bus.connect(BusSettings(nats=nats_server.url), name="other", incarnation="inc2")
    yield connected
    await connected.close()


async def test_of_a_hundred_claims_at_once_one_wins(bus: Bus, other: Bus) -> None:
    name = fresh()
    buckets = [await member.bucket(name) for member in (bus, other)]
    revision = await buckets[0].create("offer", b"blocks", ttl_s=10)
    await _one_winner(*(buckets[n % 2].delete("offer", revision=revision) for n in range(100)))
    assert await buckets[1].get("offer") is None
    await _one_winner(*(buckets[n % 2].create("offer", b"again", ttl_s=10) for n in range(100)))
    await bus.remove_bucket(name)


async def _one_winner(*claims: Awaitable[object]) -> None:
    results = await asyncio.gather(*claims, return_exceptions=True)
    lost = [result for result in results if isinstance(result, (RevisionError, KeyExistsError))]
    assert len(lost) == len(results) - 1


async def test_an_update_needs_the_revision_that_was_read(bus: Bus) -> None:
    bucket = await bus.bucket(fresh(), storage="file")
    revision = await bucket.put("k", b"1", ttl_s=5)
    with pytest.raises(KeyExistsError):
        await bucket.create("k", b"2", ttl_s=5)
    newer = await bucket.update("k", b"2", revision=revision, ttl_s=5)
    with pytest.raises(RevisionError):
        await bucket.update("k", b"3", revision=revision, ttl_s=5)
    with pytest.raises(RevisionError):
        await bucket.delete("k", revision=revision)
    entry = await bucket.get("k")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"2", newer)
    with pytest.raises(ValueError, match="above 0"):
        await bucket.put("k", b"4", ttl_s=0)
    await bus.remove_bucket(bucket.name)


async def test_keys_are_listed_by_prefix_without_a_consumer(bus: Bus) -> None:
    bucket = await bus.bucket(fresh())
    for number in range(300):
        await bucket.put(f"{'even' if number % 2 == 0 else 'odd'}.{number}", b"v", ttl_s=30)
    await bucket.delete("even.0")
    assert len(await bucket.keys()) == 299
    assert await bucket.keys("even.>") == [f"even.{number}" for number in range(2, 300, 2)]
    info = await bus._jetstream.info(bucket.stream)
    assert info is not None
    assert info["state"]["consumer_count"] == 0
    await bus.remove_bucket(bucket.name)


async def test_a_watch_tells_what_is_there_then_what_changes_and_leaves_nothing(bus: Bus) -> None:
    bucket, seen = await bus.bucket(fresh()), list[tuple[str, bytes | None]]()
    for key in ("a", "b.c"):
        await bucket.put(key, b"1", ttl_s=30)
    await bucket.put("gone", b"1", ttl_s=30)
    await bucket.delete("gone")
    watch = await bucket.watch(lambda key, value: seen.append((key, value)))
    assert sorted(seen) == [("a", b"1"), ("b.c", b"1")]
    await bucket.put("a", b"2", ttl_s=30)
    await bucket.delete("a")
    await until(lambda: len(seen) == 4)
    assert seen[2:] == [("a", b"2"), ("a", None)]
    await watch.stop()
    info = await bus._jetstream.info(bucket.stream)
    assert info is not None
    assert info["state"]["consumer_count"] == 0
    await bus.remove_bucket(bucket.name)


async def test_a_watcher_that_was_stopped_for_longer_than_a_lifetime_does_not_take_the_living_for_dead(
    bus: Bus, nats_server: EmbeddedNats
) -> None:
    """It has the renewals still to hear, so it asks before it says that a key has gone."""
    bucket, seen = await bus.bucket(fresh()), list[tuple[str, bytes | None]]()
    await bucket.put("k", b"0", ttl_s=2)
    await bucket.watch(lambda key, value: seen.append((key, value)))
    renewing = threading.Thread(target=lambda: asyncio.run(_renew(nats_server.url, bucket.name, 4)))
    renewing.start()
    time.sleep(2.8)  # noqa: ASYNC251  (the loop stands still: that is the point)
    await until(lambda: seen[-1] == ("k", b"3"))
    assert ("k", None) not in seen
    renewing.join()
    await until(lambda: seen[-1] == ("k", None))
    await bus.remove_bucket(bucket.name)


async def _renew(url: str, name: str, times: int) -> None:
    member = await Bus.connect(BusSettings(nats=url), name="renewer", incarnation="r")
    bucket = await member.bucket(name)
    for number in range(times):
        await bucket.put("k", b"%d" % number, ttl_s=2)
        await asyncio.sleep(0.8)
    await member.close()


async def test_a_bucket_that_was_made_with_roll_ups_loses_them(bus: Bus) -> None:
    name = fresh()
    older = bucket_config(name, ttl_hint_s=None, storage="memory", replicas=1)
    older |= {"allow_rollup_hdrs": True, "subject_delete_marker_ttl": NS}
    await bus._jetstream.api(f"STREAM.CREATE.KV_{name}", older)
    bucket = await bus.bucket(name)
    await bucket.put("a", b"1", ttl_s=60)
    with pytest.raises(JetStreamError, match="rollup not permitted"):
        await bus._jetstream.put(f"$KV.{name}.b", b"2", {"Nats-TTL": "60", "Nats-Rollup": "all"})
    assert await bucket.keys() == ["a"]
    await bus.remove_bucket(name)
