"""Fixtures that several test files share."""

from collections.abc import AsyncIterator, Iterator

import pytest
import structlog

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that is run inside a test chooses what is logged; the next test has it as before."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[EmbeddedNats]:
    """One nats-server for all tests that do not restart it; they keep apart by their names and keys."""
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def bus(nats_server: EmbeddedNats) -> AsyncIterator[Bus]:
    """A connection of the process `tester`."""
    connected = await Bus.connect(BusSettings(nats=nats_server.url), name="tester", incarnation="inc1")
    yield connected
    await connected.close()
