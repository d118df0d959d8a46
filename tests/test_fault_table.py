"""Every known fault of the stock protocol has a test that exists, or a reason; and the README shows the same table."""

import re
from pathlib import Path

import pytest
from tests.fault_table import EDGE_CASES, FENCES, PUSH_FAILURES, Fault, markdown
from tests.node_ids import exists

README = (Path(__file__).parents[1] / "README.md").read_text()
ALL = [*EDGE_CASES, *PUSH_FAILURES, *FENCES]
EDGE_CASES_KNOWN = 30
"""Rows of reported edge cases, some of several reports each: 51 issues in all."""


def test_no_row_is_missing() -> None:
    assert [fault.key for fault in EDGE_CASES] == [str(number) for number in range(1, EDGE_CASES_KNOWN + 1)]
    assert [fault.key for fault in PUSH_FAILURES] == list("abcdefghijklmnopqr")
    reported = [number for fault in EDGE_CASES for number in re.findall(r"\d+", fault.upstream)]
    assert len(set(reported)) == len(reported) == 51


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.key)
def test_every_fault_has_tests_that_exist_or_a_reason(fault: Fault) -> None:
    assert fault.tests or fault.cannot
    assert len(fault.must) > 10
    for test in fault.tests:
        assert exists(test), f"{test} is not there"


def test_the_readme_shows_the_table() -> None:
    shown = README.split("<!-- faults -->\n")[1].split("<!-- end of faults -->")[0]
    assert shown.strip() == markdown(), "python tests/fault_table.py prints it"
