"""Exports as other programs read them: Perfetto's trace-event format, and OpenTelemetry's own decoder."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvbus.replay.recording import Gone, read
from kvbus.trace import export
from kvbus.trace.core import Line, Story, stories_of
from kvbus_schemas import EngineCard

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))
NUMBER = (int, float)


def stories(path: Path) -> list[Story]:
    events = read(path.read_text().splitlines()).events
    lines = [
        Line(event.number, event.at_s, event.sender, event.to, event.message)
        for event in events
        if not isinstance(event.message, Gone | EngineCard)
    ]
    return stories_of(lines)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_event_is_one_of_the_trace_event_format(path: Path) -> None:
    document = json.loads(json.dumps(export.perfetto(stories(path)), allow_nan=False))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(event), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert event["args"]["name"]
            case "X":
                assert isinstance(event["ts"], NUMBER)
                assert event["dur"] > 0
            case "s" | "f":
                assert isinstance(event["ts"], NUMBER)
                assert isinstance(event["id"], int)
                assert event["ph"] == "s" or event["bp"] == "e"
            case other:
                raise AssertionError(f"no such phase: {other}")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_flow_begins_and_ends_on_a_slice_of_a_named_process(path: Path) -> None:
    """A flow whose end is on no slice is left out by Perfetto's viewer."""
    events = export.perfetto(stories(path))["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    flows = Counter((event["id"], event["ph"]) for event in events if event["ph"] in "sf")
    assert set(flows.values()) == {1}
    assert {number for number, phase in flows if phase == "s"} == {number for number, phase in flows if phase == "f"}
    for event in events:
        assert event["pid"] in named
        if event["ph"] in "sf":
            within = [1 for start, end in slices.get((event["pid"], event["tid"]), ()) if start <= event["ts"] <= end]
            assert within, event


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_slices_of_a_thread_lie_within_each_other_or_apart(path: Path) -> None:
    """What overlaps otherwise is dropped by Perfetto."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    told = stories(path)
    for event in export.perfetto(told)["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["ts"] - event["dur"]))
    assert sum(map(len, threads.values())) >= sum(len(story.lines) for story in told), "nothing is left out"
    for slices in threads.values():
        open_ends: list[int] = []
        for start, end in ((start, -end) for start, end in sorted(slices)):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_opentelemetrys_own_decoder_takes_every_span(path: Path) -> None:
    told = stories(path)
    # The JSON form writes ids in hexadecimal; protobuf's JSON would take them for base64.
    request = ParseDict(_ids_in_base64(export.otlp(told)), ExportTraceServiceRequest(), ignore_unknown_fields=False)
    spans = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
    roots = [span for span in spans if span.name == "kvbus.request"]
    assert len(roots) == len(told)
    assert len(spans) > len(roots)
    for span in spans:
        assert len(span.trace_id) == 16
        assert len(span.span_id) == 8
        assert len(span.parent_span_id) in (0, 8)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    assert len(by_id) == len(spans), "no id twice in a trace"
    for span in spans:
        if span.name != "kvbus.request":
            assert by_id[span.trace_id, span.parent_span_id].name == "kvbus.request"


def _ids_in_base64(node: Any) -> Any:
    import base64

    if isinstance(node, list):
        return [_ids_in_base64(item) for item in node]
    if not isinstance(node, dict):
        return node
    ids = ("traceId", "spanId", "parentSpanId")
    return {
        key: base64.b64encode(bytes.fromhex(value)).decode() if key in ids else _ids_in_base64(value)
        for key, value in node.items()
    }
