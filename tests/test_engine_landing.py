"""The landing core: what has landed is a set, and each request is reported once."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.engine.facts import Expect
from kvbus.engine.landing import LandingCore, Reports

EXPECT = Expect("t", "r", first_block=2, block_count=3, producer_tp=2)
FULL = [(0, 2, 2), (0, 4, 1), (1, 2, 3)]
"""(producer rank, first block, number of blocks): together everything that is expected."""


@pytest.fixture
def core() -> LandingCore:
    return LandingCore(0, 1)


def test_the_last_missing_block_reports_the_request(core: LandingCore) -> None:
    core.expect(EXPECT)
    for note in FULL[:-1]:
        core.landed("t", *note)
        assert core.take_reports() == Reports()
    core.landed("t", *FULL[-1])
    assert core.take_reports() == Reports(finished={"r"})
    assert core.take_reports() == Reports()


@pytest.mark.parametrize("order", list(permutations([*FULL, None])))
def test_notes_may_come_in_any_order_and_before_they_are_expected(
    core: LandingCore, order: tuple[tuple[int, int, int] | None, ...]
) -> None:
    for note in order:
        if note is None:
            core.expect(EXPECT)
        else:
            core.landed("t", *note)
    assert core.take_reports() == Reports(finished={"r"})
    assert not core.waiting()


def test_a_note_that_comes_twice_counts_once(core: LandingCore) -> None:
    core.expect(EXPECT)
    for _ in range(5):
        core.landed("t", *FULL[0])
    assert core.take_reports() == Reports()


def test_a_rank_that_does_not_write_here_is_counted_and_changes_nothing(core: LandingCore) -> None:
    core.expect(EXPECT)
    core.landed("t", 7, 2, 3)
    assert core.unexpected == 1
    assert core.take_reports() == Reports()


def test_with_twice_the_ranks_there_two_of_them_write_here() -> None:
    core = LandingCore(1, 2)
    core.expect(Expect("t", "r", 0, 1, producer_tp=4))
    for rank in (0, 1, 2):
        core.landed("t", rank, 0, 1)
    assert core.take_reports() == Reports()
    core.landed("t", 3, 0, 1)
    assert core.take_reports() == Reports(finished={"r"})


@pytest.mark.parametrize(("failed", "expected"), [(True, {"r"}), (False, set())])
def test_a_conclusion_gives_the_request_back_whatever_has_landed(
    core: LandingCore, failed: bool, expected: set[str]
) -> None:
    core.expect(EXPECT)
    core.landed("t", *FULL[0])
    core.conclude("r", failed=failed)
    assert core.take_reports() == Reports({"r"}, expected)


def test_a_conclusion_after_the_last_block_changes_nothing(core: LandingCore) -> None:
    core.expect(EXPECT)
    for note in FULL:
        core.landed("t", *note)
    core.conclude("r", failed=True)
    assert core.take_reports() == Reports(finished={"r"})


def test_notes_after_the_end_are_dropped(core: LandingCore) -> None:
    core.expect(EXPECT)
    core.conclude("r", failed=True)
    core.take_reports()
    core.landed("t", *FULL[0])
    assert core.early == {}
    assert core.take_reports() == Reports()


@given(st.lists(st.sampled_from([*FULL, "conclude", "take"]), max_size=20), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_any_order_and_duplication_reports_the_request_once(events: list[object], expected_at: int) -> None:
    core, times = LandingCore(0, 1), 0
    whole: list[object] = [*events, *FULL]
    whole.insert(min(expected_at, len(events)), "expect")
    for event in [*whole, *FULL, "take"]:
        if event == "expect":
            core.expect(EXPECT)
        elif event == "conclude":
            core.conclude("r", failed=True)
        elif event == "take":
            times += len(core.take_reports().finished)
        elif isinstance(event, tuple):
            core.landed("t", *event)
    assert times == 1
    assert not core.waiting()
