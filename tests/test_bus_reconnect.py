"""A reconnect that the server answers only half: the connection to it is given up whole, and the next one works."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus_schemas import AnyMessage, BlocksUnavailable, subjects

pytestmark = pytest.mark.nats

HEALED_MAX_S = 30.0
PONG = b"PONG\r\n"


class HalfDeaf:
    """A proxy to nats-server. Its connection number `deaf` passes on the server's first PONG and nothing after it."""

    def __init__(self, port: int, deaf: int) -> None:
        self._port, self._deaf = port, deaf
        self._tasks: set[asyncio.Task[None]] = set()
        self.ends: list[asyncio.Event] = []
        """One for each connection: set when the client has closed it."""
        self._writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join the client to the server."""
        self.ends.append(asyncio.Event())
        number = len(self.ends)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        ways = [
            self._pump(reader, far_writer, self.ends[-1], deaf=False),
            self._pump(far_reader, writer, asyncio.Event(), deaf=number == self._deaf),
        ]
        self._tasks |= {asyncio.create_task(way) for way in ways}

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: asyncio.Event, *, deaf: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            heard_pong = False
            while data := await reader.read(65536):
                if not (deaf and heard_pong):
                    writer.write(data)
                heard_pong = heard_pong or PONG in data
        end.set()
        writer.close()

    def cut(self) -> None:
        """End every connection."""
        for writer in self._writers:
            writer.close()

    async def close(self) -> None:
        """Cut, and wait for the pumps."""
        self.cut()
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def proxy(nats_server: EmbeddedNats) -> AsyncIterator[tuple[HalfDeaf, str]]:
    """A proxy whose second connection is half deaf, and its URL."""
    half_deaf = HalfDeaf(int(nats_server.url.rsplit(":", 1)[1]), deaf=2)
    server = await asyncio.start_server(half_deaf.accept, "127.0.0.1", 0)
    yield half_deaf, f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await half_deaf.close()


async def test_a_reconnect_without_an_answer_is_given_up_whole_and_tried_again(
    proxy: tuple[HalfDeaf, str], bus: Bus
) -> None:
    half_deaf, url = proxy
    listener = await Bus.connect(BusSettings(nats=url), name="behind-proxy", incarnation="i")
    heard: list[str] = []

    async def hear(message: AnyMessage) -> None:
        heard.append(message.key)

    key = "e" * 32
    await listener.subscribe(subjects.everything_about(key), hear)
    half_deaf.cut()
    async with asyncio.timeout(HEALED_MAX_S):
        while listener.counters.reconnects == 0:  # noqa: ASYNC110  (what is awaited is nats-py's doing)
            await asyncio.sleep(0.02)
        await half_deaf.ends[1].wait()
        fact = BlocksUnavailable(transfer_id=key, producer_id="p1", reason="failed")
        await bus.publish(fact, to="c1")
        while not heard:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await listener.close()
    assert (len(half_deaf.ends), heard) == (3, [key])
