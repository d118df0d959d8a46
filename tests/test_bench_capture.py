"""kvbus bench capture: the arms differ in what the trace takes in, and in nothing else."""

import json

import pytest

from kvbus.bench.capture import OFF, ON, Rounds, half_range, measure


@pytest.mark.nats
async def test_one_arm_is_captured_and_the_other_is_not() -> None:
    report = await measure("sim", rounds=2, requests=4, say=lambda _text: None)
    document = json.loads(report.json())
    arms = {arm["name"]: arm["metrics"] for arm in document["arms"]}
    assert document["bench"] == "capture"
    assert arms[OFF]["messages_captured_per_request"]["p50"] == 0
    assert arms[ON]["messages_captured_per_request"]["p50"] > 5
    for metrics in arms.values():
        assert metrics["ttft_ms_at_1"]["n"] == metrics["ttft_ms_at_8"]["n"] == 8
        assert metrics["ttft_ms_at_1"]["p50"] > 0
    assert isinstance(document["conditions"]["within_the_spread"], bool)


def test_the_difference_is_taken_within_each_round() -> None:
    """A machine that becomes slower for all is no difference."""
    found = Rounds()
    found.ttft_ms[OFF, 1] = [[10.0], [20.0], [30.0], [40.0]]
    found.ttft_ms[ON, 1] = [[11.0], [21.0], [31.0], [41.0]]
    assert found.difference(1) == (1.0, 7.5)
    assert half_range([1.0, 5.0]) == 2.0
