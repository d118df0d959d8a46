"""The bus against a real nats-server: messages, requests, buckets, the past."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from kvbus.bus import (
    Bus,
    BusSettings,
    GapDetector,
    JetStreamError,
    RequestTimeoutError,
)
from kvbus.embedded import EmbeddedNats
from kvbus.errors import BusError
from kvbus_schemas import (
    AnyMessage,
    BlocksUnavailable,
    DeadLetter,
    MessageTooLargeError,
    Post,
    ReuseAnswered,
    ReuseAsked,
    subjects,
)

pytestmark = pytest.mark.nats


def fact(transfer_id: str, detail: str = "") -> BlocksUnavailable:
    return BlocksUnavailable(transfer_id=transfer_id, producer_id="p1", reason="failed", detail=detail)


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


async def test_connecting_to_nothing_names_the_url_and_what_to_do() -> None:
    settings = BusSettings(nats="nats://127.0.0.1:1", connect_timeout_s=0.3)
    started_s = time.monotonic()
    with pytest.raises(BusError, match=r"nats://127\.0\.0\.1:1 .*start nats-server -js .*--nats"):
        await Bus.connect(settings, name="tester", incarnation="inc1")
    assert time.monotonic() - started_s < 2


async def test_the_envelope_is_filled_in_and_counts_from_one(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[AnyMessage]()
    await other.subscribe(subjects.everything_about(key), seen.append)
    traced = msgspec.structs.replace(fact(key), trace_id="a" * 32, span_id="b" * 16)
    await bus.post([Post("m", traced), Post("m", fact(key))])
    await until(lambda: len(seen) == 2)
    assert [(m.source, m.incarnation, m.seq) for m in seen] == [("tester", "inc1", 1), ("tester", "inc1", 2)]
    assert (seen[0].trace_id, seen[0].span_id) == ("a" * 32, "b" * 16)
    assert abs(seen[0].sent_unix_us / 1e6 - time.time()) < 5


async def test_messages_of_concurrent_publishers_are_numbered_in_the_order_they_arrive(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[int]()
    await other.subscribe(subjects.everything_about(key), lambda message: seen.append(message.seq))
    await asyncio.gather(*(bus.publish(fact(key, "x" * 5000), "m") for _ in range(200)))
    await until(lambda: len(seen) == 200)
    assert seen == list(range(1, 201))


async def test_a_queue_group_shares_messages(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[AnyMessage]()
    for member in (bus, other):
        await member.subscribe(subjects.everything_about(key), seen.append, queue="q")
    await bus.post([Post("m", fact(key))] * 20)
    await bus.barrier()
    await until(lambda: len(seen) >= 20)
    assert len(seen) == 20


async def test_a_stopped_subscription_hears_nothing_more(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[AnyMessage]()
    subscription = await other.subscribe(subjects.everything_about(key), seen.append)
    await subscription.stop()
    await other.barrier()
    await bus.publish(fact(key), "m")
    await bus.barrier()
    await asyncio.sleep(0.05)
    assert seen == []


async def test_a_failing_handler_is_counted_and_keeps_its_subscription(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[AnyMessage]()

    def handler(message: AnyMessage) -> None:
        seen.append(message)
        raise RuntimeError("on purpose")

    await other.subscribe(subjects.everything_about(key), handler)
    await bus.post([Post("m", fact(key))] * 3)
    await until(lambda: other.counters.handler_errors == 3)
    assert len(seen) == 3


@pytest.mark.parametrize("data", [b"", b"\xc1 no message", msgspec.msgpack.encode({"type": "FromTheFuture"})])
async def test_what_cannot_be_decoded_becomes_a_dead_letter_and_stops_nothing(
    bus: Bus, other: Bus, data: bytes
) -> None:
    key, seen, letters = fresh(), list[AnyMessage](), list[DeadLetter]()

    async def letter(msg: object) -> None:
        letters.append(msgspec.msgpack.decode(msg.data, type=DeadLetter))  # type: ignore[attr-defined]

    await bus._link.subscribe(subjects.dead_letters_of("other"), letter, pending_max=10)
    await other.subscribe(subjects.everything_about(key), seen.append)
    subject = subjects.subject_of(fact(key), sender="stranger", to="m")
    await bus._link.publish(subject, data)
    await bus.publish(fact(key), "m")
    await until(lambda: seen and letters)
    assert other.counters.dead_letters == 1
    assert (letters[0].source, letters[0].subject, letters[0].size_bytes) == ("other", subject, len(data))


async def test_nobody_speaks_in_anothers_name(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[AnyMessage]()
    await other.subscribe(subjects.everything_about(key), seen.append)
    forged = msgspec.structs.replace(fact(key), source="router-1")
    await bus._link.publish(subjects.subject_of(forged, sender="tester", to="m"), msgspec.msgpack.encode(forged))
    await until(lambda: other.counters.dead_letters == 1)
    assert seen == []


async def test_a_request_is_answered_and_both_are_in_the_trace(bus: Bus, other: Bus) -> None:
    conversation = fresh()

    async def answer(asked: AnyMessage) -> ReuseAnswered:
        return ReuseAnswered(conversation=asked.key, miss="new")

    await other.respond(subjects.of_kind(ReuseAsked, to="reuse"), answer, queue="reuse")
    answered = await bus.request(ReuseAsked(conversation=conversation), "reuse", timeout_s=2)
    assert isinstance(answered, ReuseAnswered)
    assert (answered.source, answered.miss) == ("other", "new")
    await other.barrier()
    traced = list[str]()
    await bus.catch_up(subjects.everything_about(conversation), lambda m: traced.append(type(m).__name__))
    assert traced == ["ReuseAsked", "ReuseAnswered"]


async def test_a_responder_that_fails_is_told_to_the_asker_at_once(bus: Bus, other: Bus) -> None:
    async def answer(asked: AnyMessage) -> None:
        raise RuntimeError("store is gone")

    await other.respond(subjects.of_kind(ReuseAsked, to="broken"), answer)
    started_s = time.monotonic()
    with pytest.raises(BusError, match="store is gone"):
        await bus.request(ReuseAsked(conversation=fresh()), "broken", timeout_s=5)
    assert time.monotonic() - started_s < 1


async def test_a_request_that_nobody_answers_ends_in_time(bus: Bus) -> None:
    with pytest.raises(RequestTimeoutError):
        await bus.request(ReuseAsked(conversation=fresh()), "nobody", timeout_s=0.1)
    assert bus._link.calls._open == {}


async def test_catching_up_covers_all_that_was_published_before_and_goes_on_from_there(bus: Bus, other: Bus) -> None:
    key = fresh()
    await bus.post([Post("m", fact(key, str(number))) for number in range(700)])
    await bus.barrier()
    past = list[AnyMessage]()
    end = await other.catch_up(subjects.everything_about(key), past.append)
    assert [m.seq for m in past] == list(range(1, 701))
    await bus.publish(fact(key, "later"), "m")
    await bus.barrier()
    later = list[AnyMessage]()
    assert await other.catch_up(subjects.everything_about(key), later.append, since_seq=end) > end
    assert [m.seq for m in later] == [701]
    again = list[AnyMessage]()
    await other.catch_up(subjects.everything_about(key), again.append, since_seq=10**9)
    assert len(again) == 701, "a stream that was made anew is read from its start"


async def test_catching_up_by_age_leaves_out_what_is_older(bus: Bus) -> None:
    key, seen = fresh(), list[str]()

    def handler(message: AnyMessage) -> None:
        assert isinstance(message, BlocksUnavailable)
        seen.append(message.detail)

    await bus.publish(fact(key, "old"), "m")
    await bus.barrier()
    await asyncio.sleep(0.6)
    await bus.publish(fact(key, "new"), "m")
    await bus.catch_up(subjects.everything_about(key), handler, since_s=0.3)
    assert seen == ["new"]


async def test_a_replay_tells_number_time_and_subject_and_leaves_no_consumer(bus: Bus) -> None:
    key = fresh()
    await bus.post([Post("m", fact(key))] * 5)
    await bus.catch_up(subjects.everything_about(key), lambda message: None)
    found = [item async for item in bus.replay(subjects.everything_about(key), limit=3)]
    assert len(found) == 3
    assert found[0][0] < found[1][0]
    assert abs(found[0][1] - time.time()) < 5
    assert found[0][2] == subjects.subject_of(fact(key), sender="tester", to="m")
    info = await bus._jetstream.info("KVBUS")
    assert info is not None
    assert info["state"]["consumer_count"] == 0


async def test_reading_a_stream_with_a_refused_filter_is_an_error_not_silence(bus: Bus) -> None:
    with pytest.raises(JetStreamError):
        await bus._jetstream.api("STREAM.INFO.NO_SUCH_STREAM")


async def test_an_oversized_message_is_refused_with_its_size_and_gets_no_number(bus: Bus, other: Bus) -> None:
    key, seen = fresh(), list[int]()
    await other.subscribe(subjects.everything_about(key), lambda message: seen.append(message.seq))
    with pytest.raises(MessageTooLargeError, match=r"BlocksUnavailable of \d+ bytes"):
        await bus.publish(fact(key, "x" * 300_000), "m")
    await bus.publish(fact(key), "m")
    await until(lambda: seen)
    assert seen == [1]


def said(seq: int, incarnation: str = "i1", source: str = "p1") -> BlocksUnavailable:
    return msgspec.structs.replace(fact("t"), source=source, incarnation=incarnation, seq=seq)


def test_a_gap_is_counted_once_per_missing_message() -> None:
    gaps = GapDetector()
    heard = [said(3), said(4), said(7), said(7), said(5), said(8), said(1, "i2"), said(2, "i2"), said(9), said(0)]
    assert [gaps.observe(message) for message in heard] == [0, 0, 2, 0, 0, 0, 0, 0, 0, 0]


def test_the_gap_detector_forgets_who_was_silent_longest() -> None:
    gaps = GapDetector(senders_max=2)
    for source in ("a", "b", "c"):
        gaps.observe(said(1, source=source))
    assert gaps.observe(said(5, source="c")) == 3
    assert gaps.observe(said(5, source="a")) == 0


async def test_a_subscription_to_everything_counts_gaps(bus: Bus, other: Bus) -> None:
    await other.subscribe(subjects.everything(), lambda message: None)
    await bus.publish(fact(fresh()), "m")
    bus._seq += 3
    await bus.publish(fact(fresh()), "m")
    await bus.barrier()
    await until(lambda: other.counters.received >= 2)
    assert other.counters.gaps == 3


async def test_closing_lets_a_handler_finish(nats_server: EmbeddedNats, bus: Bus) -> None:
    key, done = fresh(), list[AnyMessage]()

    async def slow(message: AnyMessage) -> None:
        await asyncio.sleep(0.05)
        done.append(message)

    leaving = await Bus.connect(BusSettings(nats=nats_server.url), name="leaving", incarnation="i")
    await leaving.subscribe(subjects.everything_about(key), slow)
    await bus.post([Post("m", fact(key))] * 3)
    await bus.barrier()
    await leaving.barrier()
    await leaving.close()
    assert len(done) == 3
    with pytest.raises(BusError, match="closed"):
        await leaving.publish(fact(key), "m")
