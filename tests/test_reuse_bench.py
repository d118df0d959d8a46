"""`kvbus bench reuse`, small: every size is filled completely and measured through the real process."""

import json

import pytest

from kvbus.bench.reuse import Plan, measure
from kvbus.bench.reuse_fill import key_of
from kvbus.reuse.core import is_key

pytestmark = pytest.mark.nats


def test_every_number_has_a_key_of_its_own() -> None:
    keys = {key_of(number) for number in range(-5_000, 5_000)}
    assert len(keys) == 10_000
    assert all(is_key(key) for key in keys)


async def test_a_small_run_measures_every_size() -> None:
    said: list[str] = []
    outcome = await measure(Plan(sizes=(50, 2_500), rounds=2, asks=10, fill_max_s=20.0), said.append)
    report = json.loads(outcome.json())
    assert [arm["name"] for arm in report["arms"]] == ["50", "2,500"]
    for arm in report["arms"]:
        for name in ("floor_ms", "look_ms", "claim_ms", "miss_ms"):
            assert arm["metrics"][name]["n"] == 20
            assert arm["metrics"][name]["p50"] > 0
        assert arm["metrics"]["stored_bytes_each"]["p50"] > 500
    assert report["conditions"]["look_ms_last_over_first"] > 0
    assert said
