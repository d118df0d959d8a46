"""A log that cannot be written any more (stderr closed, its reader gone) stops nothing."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus_schemas import CancelOrdered, subjects

SAYS = """
import os, sys
import structlog
from kvbus.process import configure_logging
configure_logging()
log = structlog.get_logger()
log.info("before")
{close}
log.error("after")
print("alive")
"""


@pytest.fixture
def closed_log(tmp_path: Path) -> Iterator[None]:
    """structlog as inside vLLM, where nobody has configured it, with its file closed."""
    file = (tmp_path / "log").open("w")
    file.close()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("close", ["sys.stderr.close()", "os.close(2)"])
def test_a_process_whose_stderr_was_closed_goes_on(close: str) -> None:
    done = subprocess.run([sys.executable, "-c", SAYS.format(close=close)], capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"


def test_a_process_whose_logs_reader_has_gone_goes_on() -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS.format(close="sys.stdin.read()")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=writer, text=True,
    )  # fmt: skip
    os.close(writer)
    os.close(reader)
    assert process.communicate("", timeout=30)[0] == "alive\n"
    assert process.returncode == 0


@pytest.mark.nats
@pytest.mark.usefixtures("closed_log")
async def test_a_bus_with_a_closed_log_hears_again_after_a_restart_of_nats() -> None:
    with EmbeddedNats() as server:
        bus = await Bus.connect(BusSettings(nats=server.url), name="tester", incarnation="1")
        heard: list[object] = []
        await bus.subscribe(subjects.everything(), heard.append)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(20):
            while not heard:
                if bus.connected:
                    await bus.publish(CancelOrdered(transfer_id="a" * 32, reason="test"), "all")
                await asyncio.sleep(0.1)
        await bus.close()
