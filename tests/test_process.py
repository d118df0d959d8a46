"""What every process does alike: names, log, and how signals end it."""

import json
import re
import signal
import subprocess
import sys

import pytest

from kvbus.process import new_incarnation, process_name
from kvbus_schemas import subjects

WAITING = """
import asyncio, sys
from kvbus.process import configure_logging, run
configure_logging()
async def main(stopping):
    print("ready", flush=True)
    await stopping.wait()
    print("draining", flush=True)
    {drain}
    print("done", flush=True)
run(main)
"""


def start(drain: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING.format(drain=drain)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_an_incarnation_is_12_hex_digits_and_new_each_time() -> None:
    found = {new_incarnation() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch("[0-9a-f]{12}", incarnation) for incarnation in found)


def test_a_process_name_tells_the_kind_and_fits_into_a_subject() -> None:
    assert re.fullmatch("router-[0-9a-f]{6}", process_name("router"))
    assert subjects.token(process_name("matcher"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_process_drain(number: signal.Signals) -> None:
    with start("await asyncio.sleep(0.05)") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "draining\ndone\n")
    assert json.loads(err)["event"] == "stopping", "off a terminal, the log is one JSON object a line on stderr"


def test_the_second_signal_aborts() -> None:
    with start("await asyncio.sleep(60)") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")


def test_an_error_of_main_comes_through() -> None:
    with start("raise RuntimeError('on purpose')") as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "on purpose" in err
