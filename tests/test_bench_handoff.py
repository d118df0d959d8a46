"""`kvbus bench handoff` without engines: what it makes of recorded probes, its bars, its JSON, its tokens."""

import json
from pathlib import Path

import pytest

from kvbus.bench import handoff, handoff_bars, handoff_client, handoff_points, handoff_text
from kvbus.bench.handoff_arms import ARMS
from kvbus.bench.probe import Note, Probed, Recorder, note_calls, read_notes, request_in
from kvbus.bench.report import Report
from kvbus.errors import ConfigError
from kvbus_schemas import encode

ONE, TWO = "a" * 32, "b" * 32
RECORDED = f"""\
start\t{ONE}\t100.000000
ordered\t{ONE}\t100.004000
write\t{ONE}\t100.200000
forward\t\t100.399000
write\t{ONE}\t100.400000
posted\t{ONE}\t100.401000
finished\t{ONE}\t100.402000
"""
RECORDED_DECODE = f"""\
allocated\t{ONE}\t100.001000
landed\t{ONE}\t100.404000
received\t{ONE}\t100.405000
start\t{ONE}\t100.406000
finished\t{ONE}\t100.700000
start\t{ONE}"""


def _turn(scale: float) -> handoff_points.Turn:
    answers = [handoff_client.Answer(ONE, [1, 2], 0.1 * scale, 0.01)]
    samples = handoff_points.client_samples(answers, 0.5)
    samples |= {"finish_to_start_ms": [4.0 * scale], "register_to_order_ms": [2.0], "bus_messages": [9.0]}
    return handoff_points.Turn(samples | {"bus_bytes": [3000.0]}, answers)


def _report() -> Report:
    gathered = handoff.Gathered([arm.name for arm in ARMS])
    point = handoff_points.Point(length=600, concurrency=1, requests=1)
    for number in range(2):
        for arm in ARMS:
            turn = _turn(1.0 if arm.legs == "kvbus" else 3.0)
            gathered.add(arm.name, turn.samples, f"_{point.key}")
            gathered.compare(point, number, turn)
    gathered.add("kvbus_early", {"idle_decode_cpu_percent": [7.0]})
    plan = handoff.Plan(arms=[], points=[point], rounds=2, idle_s=1.0)
    return Report(bench="handoff", arms=gathered.arms(), conditions=handoff._conditions(plan, gathered))


def test_recorded_probes_become_times(tmp_path: Path) -> None:
    """Times are between the points that a request passed on either engine; a torn last line is left out."""
    (tmp_path / "1.probe").write_text(RECORDED)
    (tmp_path / "2.probe").write_text(RECORDED_DECODE)
    samples = handoff_points.probe_samples(read_notes(tmp_path), [ONE])
    rounded = {name: round(values[0], 3) for name, values in samples.items()}
    assert rounded == {
        "finish_to_start_ms": 4.0,
        "finish_to_write_ms": -2.0,
        "finish_to_posted_ms": -1.0,
        "finish_to_landed_ms": 2.0,
        "finish_to_received_ms": 3.0,
        "register_to_order_ms": 3.0,
        "writes": 2,
    }


def test_a_recorder_writes_what_it_was_told(tmp_path: Path) -> None:
    """The request's id is found inside vLLM's ids, landing notes and packed registrations."""
    recorder = Recorder(str(tmp_path))
    recorder.note("start", f"cmpl-{ONE}-0-1234abcd")
    recorder.note("ordered", b"\x85\xaarequest_id\xd9" + TWO.encode() + b"\xff")
    recorder.note("forward")
    recorder.flush()
    assert [(note.event, note.request) for note in read_notes(tmp_path)] == [
        ("start", ONE),
        ("ordered", TWO),
        ("forward", ""),
    ]


def test_without_a_directory_nothing_is_recorded() -> None:
    """The probed connectors may be loaded without the benchmark."""
    recorder = Recorder("")
    recorder.note("start", ONE)
    assert not recorder._notes
    assert not request_in("no id here")


class _Connector:
    """As much of a connector as the probes touch."""

    def update_state_after_alloc(self, request: object, blocks: object, tokens: int) -> None:
        self.allocated = tokens

    def _xfer_blocks(self, *, remote_request_id: str) -> str:
        return remote_request_id


class _Probed(Probed, _Connector):
    pass


class _Request:
    request_id = f"cmpl-{ONE}-0"


def test_probes_pass_every_call_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector behind the probes is called as ever; only blocks for outside KV are noted."""
    monkeypatch.setenv("KVBUS_BENCH_PROBES", str(tmp_path))
    connector = _Probed()
    note_calls(connector.recorder, connector, "_xfer_blocks", ("write", "posted"), key="remote_request_id")
    connector.update_state_after_alloc(_Request(), None, 0)
    connector.update_state_after_alloc(_Request(), None, 64)
    assert connector._xfer_blocks(remote_request_id=f"kvbus|{ONE}|0") == f"kvbus|{ONE}|0"
    connector.recorder.flush()
    assert connector.allocated == 64
    assert [note.event for note in read_notes(tmp_path)] == ["allocated", "write", "posted"]


def test_every_arm_is_in_the_json() -> None:
    """One object with the shape that all benchmarks print."""
    told = json.loads(_report().json())
    assert told["bench"] == "handoff"
    assert [arm["name"] for arm in told["arms"]] == [
        "stock_pull",
        "stock_push",
        "kvbus_early",
        "kvbus_whole",
        "kvbus_matcher_in_prefill",
    ]
    ttft = told["arms"][0]["metrics"]["ttft_ms_600_c1"]
    assert {"p50", "p99", "n"} <= ttft.keys()
    assert ttft["n"] == 2


def test_bars_say_met_and_not_met() -> None:
    """Each bar has its figures; what is not reached is said."""
    report = _report()
    bars = handoff_bars.bars_of(report.arms, ["600_c1"], 0)
    assert {bar.what for bar in bars if not bar.met} == {"idle decode, percent of a core under 5"}
    text = handoff_text.text_of(report)
    assert "NOT MET  idle decode" in text
    assert "4 against 12 ms" in text


def test_differing_answers_are_counted() -> None:
    """The first arm's tokens are the measure."""
    gathered = handoff.Gathered(["x", "y"])
    point = handoff_points.Point(length=1, concurrency=1, requests=1)
    gathered.compare(point, 0, _turn(1.0))
    other = _turn(1.0)
    other.answers = [handoff_client.Answer(ONE, [1, 3], 0.1, 0.1)]
    gathered.compare(point, 0, other)
    assert gathered.differing == 1


def test_tokens_are_read_from_the_event_stream() -> None:
    """Token ids of all events in their order; an error event is an error."""
    stream = b'data: {"choices": [{"token_ids": [5]}]}\n\ndata: {"choices": [{"token_ids": [6, 7]}]}\n\ndata: [DONE]\n'
    assert handoff_client.tokens_of(stream) == [5, 6, 7]


def test_router_messages_are_counted_as_a_router_says_them() -> None:
    """The two that are added are whole messages of the wire."""
    assert all(len(encode(message)) > 200 for message in handoff_points.router_messages(ONE))


def test_an_unknown_arm_is_named() -> None:
    """Wrong usage: nothing is started."""
    with pytest.raises(ConfigError, match="stock_pul"):
        handoff._plan(True, None, "stock_pul")


def test_notes_are_in_the_order_of_time(tmp_path: Path) -> None:
    """Files of several processes are one story."""
    (tmp_path / "1.probe").write_text(f"finished\t{ONE}\t2.0\n")
    (tmp_path / "2.probe").write_text(f"start\t{ONE}\t1.0\n")
    assert read_notes(tmp_path) == [Note("start", ONE, 1.0), Note("finished", ONE, 2.0)]
