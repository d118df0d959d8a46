"""A nats-server with the permissions of `kvbus auth init`, and processes with their own keys."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from kvbus.auth.provision import provision
from kvbus.auth.setup import Access, parties_of
from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus_schemas import AnyMessage, EngineCard, encode, subjects

PARTIES = parties_of(["prefill:p0:2", "decode:d0", "decode:d1"], guests=["chooser", "rival"], routers=2)


class World:
    """`bus(name)` joins as a party, or as one of an engine's ranks."""

    def __init__(self, server: EmbeddedNats, access: Access) -> None:
        self.server, self.access = server, access

    def settings(self, user: str) -> BusSettings:
        return BusSettings(nats=self.server.url, nkey_seed_file=str(self.access.seed_file(user)), connect_timeout_s=2.0)

    @contextlib.asynccontextmanager
    async def bus(self, user: str, *, name: str = "", incarnation: str = "1") -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.settings(user), name=name or user, incarnation=incarnation)
        try:
            yield bus
        finally:
            await bus.close()


@contextlib.contextmanager
def secured(directory: Path) -> Iterator[World]:
    """A running world, with all streams in place."""
    access = Access(directory / "auth")
    access.write(PARTIES)
    with EmbeddedNats(config_file=access.conf) as server:
        world = World(server, access)

        async def make() -> None:
            async with world.bus("operator") as bus:
                await provision(bus)

        asyncio.run(make())
        yield world


@contextlib.asynccontextmanager
async def running(serve: Callable[[asyncio.Event], Awaitable[None]]) -> AsyncIterator[None]:
    """A process's main function beside the test, in the same loop."""
    stopping = asyncio.Event()
    task = asyncio.ensure_future(serve(stopping))
    try:
        yield
    finally:
        stopping.set()
        await task


class Ears:
    """What a party has heard on the subjects of its own."""

    def __init__(self) -> None:
        self.heard: list[AnyMessage] = []

    def __call__(self, message: AnyMessage) -> None:
        self.heard.append(message)

    async def one(self, kind: type[AnyMessage], within_s: float = 5.0) -> AnyMessage:
        async with asyncio.timeout(within_s):
            while True:
                for message in self.heard:
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.01)


async def announce(bus: Bus, engine_id: str) -> None:
    """Put an engine's card, with its own key."""
    card = EngineCard(
        engine_id=engine_id, role="prefill" if engine_id[0] == "p" else "decode", model="m", http_url="http://h",
        block_size=16, num_blocks=99, compat_hash="c",
    )  # fmt: skip
    bucket = await bus.bucket(subjects.ENGINES_BUCKET)
    await bucket.put(engine_id, encode(bus.envelope(card)), ttl_s=60)
