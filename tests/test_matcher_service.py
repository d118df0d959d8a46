"""Matcher processes on a real nats-server: both arrival orders, a killed one, a standby that takes over."""

import asyncio
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from time import monotonic
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.local.ports import free_port
from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    PushOrdered,
    TransferClosed,
    subjects,
)

pytestmark = pytest.mark.nats
T = "a" * 32


class Engines:
    """A prefill and a decode engine as far as the bus sees them: cards, and what is said to them."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.heard: list[tuple[float, AnyMessage]] = []

    async def start(self) -> None:
        for kind in (PushOrdered, BlocksUnavailable, CancelOrdered):
            for name in ("p0", "d0"):
                await self.bus.subscribe(subjects.of_kind(kind, to=name), self._hear)
        await self.announce("p0", "d0")

    async def announce(self, *names: str, incarnation: str = "1") -> None:
        bucket = await self.bus.bucket(subjects.ENGINES_BUCKET)
        for name in names:
            card = EngineCard(
                engine_id=name, incarnation=incarnation, role="prefill" if name[0] == "p" else "decode", model="m",
                http_url="http://h", block_size=16, num_blocks=99, compat_hash="c",
            )  # fmt: skip
            await bucket.put(name, msgspec.msgpack.encode(card), ttl_s=60)

    def _hear(self, message: AnyMessage) -> None:
        self.heard.append((monotonic(), message))

    async def hear(self, kind: type[AnyMessage], key: str = T, within_s: float = 5.0) -> Any:
        """The first message of that kind about `key`; fails after `within_s` seconds."""
        return (await self.hear_at(kind, key, within_s))[1]

    async def hear_at(self, kind: type[AnyMessage], key: str = T, within_s: float = 5.0) -> tuple[float, Any]:
        async with asyncio.timeout(within_s):
            while True:
                for at_s, message in self.heard:
                    if isinstance(message, kind) and message.key == key:
                        return at_s, message
                await asyncio.sleep(0.01)


REGISTERED = BlocksRegistered(
    transfer_id=T, producer_id="p0", producer_incarnation="1", consumer_id="d0", consumer_incarnation="1",
    block_ids=[[5, 6]], first_block=0, token_count=20, prompt_digest="f00d", block_size=16, compat_hash="c",
    lease_s=30.0,
)  # fmt: skip
READY = BlocksReady(
    transfer_id=T, producer_id="p0", block_ids=[[1, 2]], token_count=20, prompt_digest="f00d", lease_s=30.0
)


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    """A server for one test: a matcher believes all that it finds there."""
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def engines(server: EmbeddedNats) -> AsyncIterator[Engines]:
    bus = await Bus.connect(BusSettings(nats=server.url), name="d0", incarnation="1")
    engines = Engines(bus)
    await engines.start()
    yield engines
    await bus.close()


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def matcher(server: EmbeddedNats) -> Iterator[Start]:
    """Starts matcher processes, as a user does, and ends them."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT, "--nats", server.url, *arguments]
        running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


SCRIPT = "import typer; from kvbus.cli import matcher; app = typer.Typer(); matcher.register(app); app()"


async def until(holds: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Wait for another process's doing."""
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110  (no event of ours tells it)
            await asyncio.sleep(0.02)


async def active(engines: Engines, not_by: str = "", within_s: float = 10.0) -> str:
    """Wait until somebody (else than `not_by`) holds the lease; who."""
    bucket = await engines.bus.bucket(subjects.LEASES_BUCKET)
    holders = [not_by]

    async def taken() -> bool:
        entry = await bucket.get("matcher")
        holders.append(entry.value.decode() if entry else not_by)
        return holders[-1] != not_by

    await until(taken, within_s)
    return holders[-1]


async def test_both_arrival_orders_end_in_one_order_at_the_producer(engines: Engines, matcher: Start) -> None:
    matcher()
    await active(engines)
    await engines.bus.publish(REGISTERED, "matcher")
    await engines.bus.publish(READY, "matcher")
    await engines.bus.publish(replace(READY, transfer_id="b" * 32), "matcher")
    await engines.bus.publish(replace(REGISTERED, transfer_id="b" * 32), "matcher")
    orders = [await engines.hear(PushOrdered, key) for key in (T, "b" * 32)]
    await asyncio.sleep(0.3)
    assert [order.block_ids for order in orders] == [[[5, 6]], [[5, 6]]]
    assert len(engines.heard) == 2


async def test_a_refusal_names_both_values_and_reaches_both_engines(engines: Engines, matcher: Start) -> None:
    matcher()
    await active(engines)
    await engines.bus.publish(replace(REGISTERED, compat_hash="other"), "matcher")
    answer = await engines.hear(BlocksUnavailable)
    assert answer.reason == "refused"
    assert "'other'" in answer.detail
    assert "'c'" in answer.detail
    await asyncio.sleep(0.1)
    assert len(engines.heard) == 2


async def test_what_a_producer_tells_a_consumer_alone_ends_the_transfer_here_too(
    server: EmbeddedNats, engines: Engines, matcher: Start
) -> None:
    matcher()
    await active(engines)
    prefill = await Bus.connect(BusSettings(nats=server.url), name="p0", incarnation="1")
    failed = BlocksUnavailable(transfer_id=T, producer_id="p0", reason="failed", detail="boom")
    await prefill.publish(failed, "d0")
    await prefill.barrier()
    await engines.bus.publish(REGISTERED, "matcher")
    await asyncio.sleep(0.5)
    await prefill.close()
    assert [(type(m), m.source.split("-")[0]) for _, m in engines.heard] == [
        (BlocksUnavailable, "p0"),
        (BlocksUnavailable, "matcher"),
    ]


async def test_a_refusal_of_a_second_registration_does_not_end_the_first(engines: Engines, matcher: Start) -> None:
    matcher()
    await active(engines)
    await engines.bus.publish(REGISTERED, "matcher")
    await engines.hear(PushOrdered)
    await engines.bus.publish(replace(REGISTERED, block_ids=[[8, 9]]), "matcher")
    await engines.hear(BlocksUnavailable)
    await asyncio.sleep(0.2)
    engines.heard.clear()
    await engines.bus.publish(REGISTERED, "matcher")
    assert (await engines.hear(PushOrdered)).block_ids == [[5, 6]]


async def test_a_registration_made_while_no_matcher_ran_is_ordered_by_the_next(
    engines: Engines, matcher: Start
) -> None:
    first = matcher()
    await active(engines)
    first.kill()
    first.wait()
    await engines.bus.publish(REGISTERED, "matcher")
    await engines.bus.publish(replace(REGISTERED, transfer_id="b" * 32), "matcher")
    closed = TransferClosed(transfer_id="b" * 32, producer_id="p0", consumer_id="d0", outcome="cancelled")
    await engines.bus.publish(closed, "p0")
    matcher()
    order = await engines.hear(PushOrdered, within_s=10)
    assert 20 < order.lease_s <= 30
    await asyncio.sleep(0.3)
    assert [message.key for _, message in engines.heard] == [T]


async def test_a_standby_takes_over_within_three_seconds_and_knows_what_happened(
    engines: Engines, matcher: Start
) -> None:
    first = matcher()
    holder = await active(engines)
    matcher()
    await asyncio.sleep(2.5)
    assert await active(engines) == holder
    first.send_signal(signal.SIGSTOP)  # it stalls: alive, connected, silent
    stalled_s = monotonic()
    await engines.bus.publish(REGISTERED, "matcher")
    heard_s, _ = await engines.hear_at(PushOrdered)
    assert heard_s - stalled_s < 3.2  # 3 s from its last renewal, and one tick
    assert await active(engines) != holder
    orders = len(engines.heard)
    first.send_signal(signal.SIGCONT)
    await asyncio.sleep(1)
    await engines.bus.publish(replace(REGISTERED, transfer_id="b" * 32), "matcher")
    await engines.hear(PushOrdered, "b" * 32)
    await asyncio.sleep(0.3)
    assert len([m for _, m in engines.heard if m.key == "b" * 32]) == 1
    assert orders >= 1


async def test_a_matcher_that_is_stopped_hands_over_at_once(engines: Engines, matcher: Start) -> None:
    first = matcher()
    holder = await active(engines)
    matcher()
    await asyncio.sleep(2)
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.wait, 5) == 0
    await active(engines, not_by=holder, within_s=1)


async def test_an_engine_that_withdraws_its_card_ends_what_it_had_open(engines: Engines, matcher: Start) -> None:
    matcher()
    await active(engines)
    await engines.bus.publish(REGISTERED, "matcher")
    await engines.hear(PushOrdered)
    bucket = await engines.bus.bucket(subjects.ENGINES_BUCKET)
    await bucket.delete("p0")
    assert (await engines.hear(BlocksUnavailable)).reason == "producer_gone"


async def test_a_restart_of_nats_ends_no_transfer_of_engines_that_come_back(
    server: EmbeddedNats, engines: Engines, matcher: Start
) -> None:
    matcher()
    await active(engines)
    await engines.bus.publish(REGISTERED, "matcher")
    await engines.hear(PushOrdered)
    await asyncio.to_thread(server.restart)

    async def is_back() -> bool:
        return engines.bus.connected and engines.bus.counters.reconnects > 0

    await until(is_back, within_s=10)
    await asyncio.sleep(1)
    await engines.announce("p0", "d0")
    await active(engines)
    await engines.bus.publish(replace(REGISTERED, transfer_id="b" * 32), "matcher")
    await engines.hear(PushOrdered, "b" * 32, within_s=8)
    await asyncio.sleep(6)
    assert {type(message) for _, message in engines.heard} == {PushOrdered}


async def test_metrics_count_what_was_done(engines: Engines, matcher: Start) -> None:
    port = free_port()
    matcher("--metrics-port", str(port))
    await active(engines)
    await engines.bus.publish(REGISTERED, "matcher")
    await engines.hear(PushOrdered)

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            return str(reply.read().decode())

    text = await asyncio.to_thread(read)
    assert 'kvbus_matcher_events_total{event="ordered"} 1.0' in text
    assert "kvbus_matcher_open_transfers 1.0" in text
    assert "kvbus_matcher_active 1.0" in text
