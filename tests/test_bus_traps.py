"""Each trap of NATS and nats-py that bites kvbus, against a real nats-server: the cure holds."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest

from kvbus.bus import Bus, BusSettings, KeyExistsError
from kvbus.embedded import EmbeddedNats
from kvbus.errors import BusError
from kvbus_schemas import AnyMessage, BlocksUnavailable, Post, ReuseAsked, decode, encode, subjects

pytestmark = pytest.mark.nats


def fact(transfer_id: str, detail: str = "") -> BlocksUnavailable:
    return BlocksUnavailable(transfer_id=transfer_id, producer_id="p1", reason="failed", detail=detail)


def fresh() -> str:
    return secrets.token_hex(16)


async def until(holds: Callable[[], object], timeout_s: float = 5.0) -> float:
    """Wait until `holds()`; the seconds that it took."""
    started_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  (what is awaited is another process's doing)
            await asyncio.sleep(0.005)
    return time.monotonic() - started_s


async def gone_after(look: Callable[[], Awaitable[object]], timeout_s: float) -> float:
    """Wait until `look()` finds nothing; the seconds that it took."""
    started_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while await look() is not None:  # noqa: ASYNC110  (the server does it, unseen)
            await asyncio.sleep(0.02)
    return time.monotonic() - started_s


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    """A nats-server that a test may restart."""
    with EmbeddedNats() as started:
        yield started


@pytest.fixture
async def connect(server: EmbeddedNats) -> AsyncIterator[Callable[..., Awaitable[Bus]]]:
    """Connects processes to that server, and closes them."""
    connected = list[Bus]()

    async def joined(name: str, **settings: int) -> Bus:
        connected.append(
            await Bus.connect(BusSettings(nats=server.url, **settings), name=name, incarnation="i")  # type: ignore[arg-type]
        )
        return connected[-1]

    yield joined
    for bus in connected:
        await bus.close()


async def restart(server: EmbeddedNats, *buses: Bus, down_s: float = 0.0) -> None:
    """Kill the server with SIGKILL, start it again, and wait until `buses` have noticed and returned."""
    before = [bus.counters.reconnects for bus in buses]
    await asyncio.to_thread(server.restart, down_s=down_s)
    await until(lambda: all(bus.counters.reconnects > count for bus, count in zip(buses, before, strict=True)), 10)


async def test_nothing_published_after_subscribe_returned_is_missed(nats_server: EmbeddedNats, bus: Bus) -> None:
    """nats-py's flush() lets its PING overtake the SUB; about one message in ten was lost that way."""
    other = await Bus.connect(BusSettings(nats=nats_server.url), name="other", incarnation="i")
    heard, keys = set[str](), [fresh() for _ in range(300)]

    def hear(message: AnyMessage) -> None:
        heard.add(message.key)

    for key in keys:
        await other.subscribe(subjects.everything_about(key), hear)
        await bus.publish(fact(key), "m")
    await bus.barrier()
    await other.barrier()
    await asyncio.sleep(0.1)
    await other.close()
    assert heard == set(keys)


async def test_subscribe_is_a_barrier_even_behind_a_full_buffer(nats_server: EmbeddedNats, bus: Bus) -> None:
    other = await Bus.connect(BusSettings(nats=nats_server.url), name="other", incarnation="i")
    missed = 0
    for _ in range(30):
        key, seen = fresh(), list[AnyMessage]()
        await other.post([Post("m", fact(fresh(), "x" * 4000))] * 30)
        await other.subscribe(subjects.everything_about(key), seen.append)
        await bus.publish(fact(key), "m")
        try:
            await until(partial(len, seen), 1)
        except TimeoutError:
            missed += 1
    await other.close()
    assert missed == 0


async def test_an_expired_key_is_gone_is_told_gone_and_can_be_created_again(bus: Bus) -> None:
    """Nothing is stored at that moment: a watch tells it all the same."""
    bucket, seen = await bus.bucket(fresh()), list[tuple[str, bytes | None]]()
    await bucket.watch(lambda key, value: seen.append((key, value)))
    await bucket.create("k", b"1", ttl_s=0.3)
    assert 0.7 <= await gone_after(lambda: bucket.get("k"), 3) <= 1.3
    await until(lambda: seen == [("k", b"1"), ("k", None)])
    assert await bucket.get("k") is None
    assert await bucket.keys() == []
    await bucket.create("k", b"2", ttl_s=5)
    with pytest.raises(KeyExistsError):
        await bucket.create("k", b"3", ttl_s=5)
    await bus.remove_bucket(bucket.name)


async def test_an_update_keeps_the_end_of_a_lifetime_and_never_drops_it(bus: Bus) -> None:
    """nats-py's update() removes the lifetime: the key would live for ever."""
    bucket = await bus.bucket(fresh())
    revision, started_s = await bucket.create("k", b"0", ttl_s=2), time.monotonic()
    for number in range(3):
        await asyncio.sleep(0.3)
        entry = await bucket.get("k")
        assert entry is not None
        assert entry.remaining_s is not None
        revision = await bucket.update("k", b"%d" % number, revision=revision, ttl_s=entry.remaining_s)
    await gone_after(lambda: bucket.get("k"), 5)
    assert 1.9 <= time.monotonic() - started_s <= 3.5
    await bus.remove_bucket(bucket.name)


async def test_a_deleted_key_leaves_no_immortal_tombstone(bus: Bus) -> None:
    bucket = await bus.bucket(fresh())
    await bucket.put("k", b"1", ttl_s=60)
    await bucket.delete("k")
    await gone_after(lambda: bus._jetstream.last(bucket.stream, f"$KV.{bucket.name}.k"), 5)
    await bus.remove_bucket(bucket.name)


async def test_a_watch_hears_again_within_two_seconds_of_a_restart(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    """nats-py's watcher is deaf for 19 s. Nothing is told twice, and what vanished meanwhile is told."""
    writer, watcher = await connect("writer"), await connect("watcher")
    seen = list[tuple[str, bytes | None]]()
    bucket = await writer.bucket("kept", storage="file")
    await bucket.put("stays", b"1", ttl_s=60)
    await bucket.put("expires", b"1", ttl_s=1)
    watched = await watcher.bucket("kept", storage="file")
    await watched.watch(lambda key, value: seen.append((key, value)))
    await restart(server, writer, watcher, down_s=1.5)
    returned_s = time.monotonic()
    await bucket.put("new", b"2", ttl_s=60)
    await until(lambda: ("new", b"2") in seen and ("expires", None) in seen)
    assert time.monotonic() - returned_s < 2
    assert sorted(seen, key=str) == [("expires", None), ("expires", b"1"), ("new", b"2"), ("stays", b"1")]


async def test_a_memory_bucket_is_made_again_and_its_keys_are_told_gone(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    bus = await connect("tester")
    seen = list[tuple[str, bytes | None]]()
    bucket = await bus.bucket("volatile", storage="memory")
    await bucket.put("k", b"1", ttl_s=60)
    await bucket.watch(lambda key, value: seen.append((key, value)))
    await restart(server, bus)
    await bucket.put("k2", b"2", ttl_s=60)
    await until(lambda: ("k2", b"2") in seen)
    await until(lambda: len(seen) == 3)
    assert sorted(seen, key=str) == [("k", None), ("k", b"1"), ("k2", b"2")]


async def test_after_kill_9_what_was_missed_is_caught_up_from_the_stream(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    speaker, listener = await connect("speaker"), await connect("listener")
    heard, caught_up = set[int](), asyncio.Event()
    subject = subjects.of_kind(BlocksUnavailable)
    await listener.subscribe(subject, lambda message: heard.add(message.seq))
    position = await listener.catch_up(subject, lambda message: heard.add(message.seq))

    async def returned() -> None:
        await listener.catch_up(subject, lambda message: heard.add(message.seq), since_seq=position)
        caught_up.set()

    listener.on_connected.append(returned)
    await speaker.post([Post("m", fact(fresh())) for _ in range(50)])
    await speaker.barrier()
    await asyncio.to_thread(server.kill)
    await until(lambda: not speaker.connected and not listener.connected)
    await speaker.post([Post("m", fact(fresh())) for _ in range(50)])
    await asyncio.to_thread(server.start)
    await until(caught_up.is_set, 10)
    await speaker.barrier()
    await listener.catch_up(subject, lambda message: heard.add(message.seq), since_seq=position)
    assert heard == set(range(1, 101))


async def test_while_nats_is_away_publishing_waits_up_to_a_limit_and_then_raises(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    bus = await connect("tester", pending_size_bytes=20_000)
    await asyncio.to_thread(server.kill)
    await until(lambda: not bus.connected)
    with pytest.raises(BusError, match="no connection to NATS"):
        await bus.post([Post("m", fact(fresh(), "x" * 1000))] * 100)
    sent = bus.counters.published
    assert 10 < sent < 20
    await asyncio.to_thread(server.start)
    await until(lambda: bus.connected, 10)
    await bus.barrier()
    seen = list[int]()
    await bus.catch_up(subjects.everything(), lambda message: seen.append(message.seq))
    assert seen == list(range(1, sent + 1)), "what was refused has no number, what was taken arrives"


async def test_a_slow_handler_costs_itself_counted_drops_and_others_nothing(
    nats_server: EmbeddedNats, bus: Bus
) -> None:
    settings = BusSettings(nats=nats_server.url, subscription_pending_max=10)
    listener = await Bus.connect(settings, name="listener", incarnation="i")
    key, slow, quick = fresh(), list[AnyMessage](), list[AnyMessage]()
    release = asyncio.Event()

    async def stuck(message: AnyMessage) -> None:
        slow.append(message)
        await release.wait()

    stuck_one = await listener.subscribe(subjects.everything_about(key), stuck)
    await listener.subscribe(subjects.everything_about(key), quick.append)
    for _ in range(100):
        await bus.publish(fact(key), "m")
        await bus.barrier()
    await until(lambda: len(quick) == 100)
    release.set()
    await until(lambda: len(slow) == 11)
    assert listener.counters.slow_consumer_drops == stuck_one.dropped == 89
    await listener.close()


async def test_a_server_with_a_smaller_limit_refuses_by_name(tmp_path: Path) -> None:
    config = tmp_path / "small.conf"
    config.write_text("max_payload: 1024\n")
    with EmbeddedNats(config_file=config) as server:
        bus = await Bus.connect(BusSettings(nats=server.url), name="tester", incarnation="i")
        with pytest.raises(BusError, match=r"\d+ bytes for kvbus\.v1.* max_payload of 1024"):
            await bus.publish(fact(fresh(), "x" * 2000), "m")
        await bus.close()


async def test_a_plain_client_gets_its_answer_and_not_the_streams_acknowledgement(bus: Bus) -> None:
    """An acknowledging stream would answer each captured request before its responder does."""

    async def answer(asked: AnyMessage) -> BlocksUnavailable:
        return fact(fresh(), "from the responder")

    await bus.respond(subjects.of_kind(ReuseAsked, to="plain"), answer)
    client = await nats.connect(bus._link.settings.nats)
    asked = ReuseAsked(conversation=fresh(), source="foreign")
    reply = await client.request(subjects.subject_of(asked, sender="foreign", to="plain"), encode(asked), timeout=2)
    await client.close()
    message = decode(reply.data)
    assert isinstance(message, BlocksUnavailable)
    assert message.detail == "from the responder"


async def test_a_burst_of_messages_is_all_in_the_trace(bus: Bus) -> None:
    """Over its intake limit a file stream drops silently; the server's limit is raised in our configuration."""
    key = fresh()
    await bus.post([Post("m", fact(key))] * 20_000)
    count = 0

    def counted(_: AnyMessage) -> None:
        nonlocal count
        count += 1

    await bus.catch_up(subjects.everything_about(key), counted)
    assert count == 20_000


async def test_a_server_that_was_stopped_for_longer_than_a_barrier_waits_is_heard_again_at_once(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    """Found by `kvbus chaos`: the PONG of a flush() that had timed out ended nats-py's reader."""
    bus = await connect("patient")
    heard: list[AnyMessage] = []
    await bus.subscribe(subjects.everything(), heard.append)
    server.send(signal.SIGSTOP)
    with pytest.raises(BusError):
        await bus._link.barrier(timeout_s=1.0)
    server.send(signal.SIGCONT)
    await bus.publish(fact(fresh()), "c1")
    assert await until(lambda: heard) < 4.0  # ten seconds and more by pings
    assert bus.counters.reconnects == 0


@pytest.mark.parametrize("half", ["_reading_task", "_flusher_task"])
async def test_a_connection_that_is_up_in_name_only_is_made_anew(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]], half: str
) -> None:
    """Found by `kvbus chaos`: nats-py's reader or writer had ended, and every request to a router was answered 500."""
    bus = await connect("half-dead")
    heard: list[AnyMessage] = []
    await bus.subscribe(subjects.everything(), heard.append)
    getattr(bus._link._client, half).cancel()
    await until(lambda: bus.counters.reconnects)
    await bus.publish(fact(fresh()), "c1")
    await until(lambda: heard)


async def test_a_publish_on_a_transport_that_closed_unnoticed_is_sent_after_the_reconnect(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    """Found by `kvbus chaos`: uvloop's RuntimeError went through the router to its client."""
    import uvloop

    ended: list[int] = []

    async def scenario() -> None:
        bus = await Bus.connect(BusSettings(nats=server.url), name="on-uvloop", incarnation="1")
        heard: list[AnyMessage] = []
        await bus.subscribe(subjects.everything(), heard.append)
        client: Any = bus._link._client
        client._flusher_task.cancel()
        await asyncio.wait({client._flusher_task})  # so that `publish` writes itself, as it does with a full buffer
        client._transport._io_writer.transport.abort()
        await asyncio.sleep(0)
        await bus.publish(fact(fresh()), "c1")
        await until(lambda: heard)
        ended.append(bus.counters.reconnects)
        await bus.close()

    await asyncio.to_thread(uvloop.run, scenario())
    assert ended[0] >= 1


async def test_what_could_not_be_done_after_a_reconnect_is_tried_until_it_can(
    server: EmbeddedNats, connect: Callable[..., Awaitable[Bus]]
) -> None:
    """Found by `kvbus chaos`: matchers whose catch-up timed out after a restart of NATS never paired anything again."""
    bus = await connect("healing")
    calls: list[str] = []

    async def busy_at_first() -> None:
        calls.append("busy")
        if calls.count("busy") < 3:
            raise BusError("no answer within 3.0 s")

    async def wrong() -> None:
        calls.append("wrong")
        raise ValueError("a fault of its own")

    async def good() -> None:
        calls.append("good")

    bus.on_connected += [busy_at_first, wrong, good]
    await asyncio.to_thread(server.restart)
    await until(lambda: calls.count("busy") == 3, timeout_s=15.0)
    await asyncio.sleep(1.2)
    assert sorted(calls) == ["busy"] * 3 + ["good", "wrong"]
    assert bus.counters.handler_errors == 1
