"""When an engine has drained."""

from typing import Any

import pytest

from kvbus.engine.serve import Drain
from kvbus_schemas import LoadReported


def load(**busy: int) -> LoadReported:
    fields: dict[str, Any] = {
        "running": 0,
        "waiting": 0,
        "free_blocks": 511,
        "total_blocks": 512,
        "held_blocks": 0,
    } | busy
    return LoadReported(engine_id="prefill-0", **fields)


def drained(*reports: LoadReported) -> bool:
    drain = Drain()
    for report in reports:
        drain.heard(report)
    return drain.done.is_set()


def test_two_quiet_reports_in_a_row_mean_drained() -> None:
    assert not drained(load())
    assert drained(load(), load())
    assert not drained(load(), load(running=1), load())


@pytest.mark.parametrize("busy", [{"running": 1}, {"waiting": 1}, {"free_blocks": 480}])
def test_requests_and_blocks_that_wait_for_a_decode_keep_an_engine_alive(busy: dict[str, int]) -> None:
    assert not drained(load(**busy), load(**busy), load(**busy))


def test_blocks_that_are_kept_for_conversations_do_not() -> None:
    kept = load(free_blocks=400, held_blocks=111)
    assert drained(kept, kept)
