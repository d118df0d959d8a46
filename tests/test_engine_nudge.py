"""A rank's call to its scheduler: heard when somebody listens, harmless when nobody does."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvbus.engine.nudge import Ear, Nudge


@pytest.fixture
def name() -> str:
    return f"prefill-0.{uuid.uuid4().hex}"


@pytest.fixture
def heard(name: str) -> Iterator[threading.Semaphore]:
    """Counts what an ear of this name hears."""
    calls = threading.Semaphore(0)
    with closing(Ear(name, calls.release)):
        yield calls


def test_a_nudge_is_heard(name: str, heard: threading.Semaphore) -> None:
    """Every rank of the engine reaches the same ear."""
    with closing(Nudge(name)) as one, closing(Nudge(name)) as other:
        for nudge in (one, other):
            nudge()
            assert heard.acquire(timeout=10)


def test_a_nudge_to_nobody_is_nothing(name: str) -> None:
    """The scheduler may be on another machine, or not there yet."""
    with closing(Nudge(name)) as nudge:
        nudge()


def test_another_incarnations_nudge_is_not_heard(name: str, heard: threading.Semaphore) -> None:
    """Names are engine and incarnation, however long: an old process's rank wakes nobody."""
    with closing(Nudge(name + "0")) as other, closing(Nudge(name)) as own:
        other()
        own()
        assert heard.acquire(timeout=10)
        assert not heard.acquire(timeout=0.05)


def test_a_name_that_is_taken_leaves_the_engine_without_an_ear(name: str, heard: threading.Semaphore) -> None:
    """It then looks at its bound instead; it does not fail to start."""
    second = threading.Semaphore(0)
    with closing(Ear(name, second.release)), closing(Nudge(name)) as nudge:
        nudge()
        assert heard.acquire(timeout=10)
        assert not second.acquire(timeout=0.05)


def test_long_names_keep_their_end() -> None:
    """The incarnation is what tells two processes apart."""
    name, heard = "e" * 200 + uuid.uuid4().hex, threading.Semaphore(0)
    with closing(Ear(name, heard.release)), closing(Nudge("x" + name)) as nudge:
        nudge()
        assert heard.acquire(timeout=10)
