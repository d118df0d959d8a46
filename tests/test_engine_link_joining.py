"""An engine's link gets onto the bus whatever NATS does meanwhile."""

import asyncio
import signal
from collections.abc import Iterator

import pytest
from tests.engine_world import card

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.engine.link import Link, LinkHandlers
from kvbus.local.ports import free_port
from kvbus_schemas import EVERYONE, EngineCard, LoadReported, Post, decode, subjects

pytestmark = pytest.mark.nats

STOPPED_S = 6.5
"""Longer than a subscription waits for the server."""
ANNOUNCED_MAX_S = 30.0


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as started:
        yield started


class Interrupted(Link):
    """NATS stops as soon as the link is connected for the first time, before it hears anything."""

    server: EmbeddedNats
    connects = 0

    async def _connect(self) -> Bus | None:
        bus = await super()._connect()
        self.connects += 1
        if self.connects == 1:
            self.server.send(signal.SIGSTOP)
        return bus


async def test_an_engine_that_starts_while_nats_stops_is_announced_all_the_same(server: EmbeddedNats) -> None:
    """Found by `kvbus chaos`: its link's thread had ended, and the engine was never chosen until it was restarted."""
    own = card("d0")
    link = Interrupted(BusSettings(nats=server.url), name="d0", engine_id="d0", incarnation=own.incarnation)
    link.server = server
    link.start(LinkHandlers(hear=lambda _: None, seen=lambda _: None, gone=lambda _: None, card=lambda: own))
    try:
        await asyncio.sleep(STOPPED_S)
        server.send(signal.SIGCONT)
        bus = await Bus.connect(BusSettings(nats=server.url), name="observer", incarnation="i")
        bucket = await bus.bucket(subjects.ENGINES_BUCKET)
        async with asyncio.timeout(ANNOUNCED_MAX_S):
            while (entry := await bucket.get("d0")) is None:  # noqa: ASYNC110  (another process does it)
                await asyncio.sleep(0.1)
        announced = decode(entry.value)
        assert isinstance(announced, EngineCard)
        assert announced.incarnation == own.incarnation
        await bus.close()
    finally:
        server.send(signal.SIGCONT)
        await asyncio.to_thread(link.stop)


async def test_what_is_posted_before_nats_is_there_goes_out_with_nothing_said_after_it() -> None:
    server = EmbeddedNats(port=free_port())
    link = Link(BusSettings(nats=server.url), name="d0", engine_id="d0", incarnation="i")
    link.start(LinkHandlers(hear=lambda _: None, seen=lambda _: None, gone=lambda _: None))
    link.post([Post(EVERYONE, LoadReported(engine_id="d0", running=7, waiting=0, free_blocks=1, total_blocks=1))])
    try:
        with server:
            bus = await Bus.connect(BusSettings(nats=server.url), name="observer", incarnation="i")
            async with asyncio.timeout(ANNOUNCED_MAX_S):
                while not [m async for _, _, _, m in bus.replay(subjects.of_kind(LoadReported), since_s=60.0)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await bus.close()
    finally:
        await asyncio.to_thread(link.stop)
