"""The trace for other tools: JSON lines, Perfetto's viewer, OpenTelemetry collectors. Pure; nothing is left out and
nothing is added, so that what holds for the bus (no prompts, no tokens) holds for every export."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvbus.trace.core import Line, Stage, Story
from kvbus.trace.perfetto import perfetto, took_ms
from kvbus.trace.phrases import phrase_of
from kvbus.trace.presence import Presence, Record
from kvbus_schemas import subjects

__all__ = ["jsonl", "otlp", "perfetto", "took_ms"]

Json = dict[str, Any]
US = 1_000_000


def jsonl(lines: Iterable[Line], presence: Iterable[Presence] = ()) -> Iterator[str]:
    """One JSON object a line: what the stream held, in its order; `kvbus replay` reads it. Lines of `presence` stand
    among them, marked `derived`."""
    derived = [
        Record(seq=one.seq, unix_s=one.at_s, subject=one.subject, message=one.card, derived=True) for one in presence
    ]
    stored = [
        Record(
            seq=line.seq,
            unix_s=line.at_s,
            subject=subjects.subject_of(line.message, sender=line.sender, to=line.to),
            message=line.message,
        )
        for line in lines
    ]
    for record in sorted(derived + stored, key=lambda record: record.seq):
        yield msgspec.json.encode(record).decode()


def otlp(stories: Iterable[Story]) -> Json:
    """OpenTelemetry spans in OTLP's JSON form: one for each request, its stages below it, on the trace of the client's
    `traceparent` where there was one. A collector takes it at /v1/traces."""
    spans = [span for story in stories for span in _spans(story)]
    resource = {"attributes": [_attribute("service.name", "kvbus")]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "kvbus"}, "spans": spans}]}]}


def _spans(story: Story) -> list[Json]:
    sent = [line.message for line in story.lines if line.message.trace_id]
    trace_id = sent[0].trace_id if sent else _digest(story.transfer_id, 32)
    root_id = _digest(f"{story.transfer_id} request", 16)
    end_s = max(story.lines[-1].at_s, story.began_s + story.duration_ms / 1000)
    root = _span(trace_id, root_id, "kvbus.request", story.began_s, end_s) | {
        "parentSpanId": sent[0].span_id if sent else "",
        "status": {"code": 2 if story.outcome in ("failed", "expired") else 1},
        "events": [
            {"timeUnixNano": _nano(line.at_s), "name": f"{type(line.message).__name__}: {phrase_of(line.message)}"}
            for line in story.lines
        ],
        "attributes": [
            _attribute("kvbus.request_id", story.request_id),
            _attribute("kvbus.transfer_id", story.transfer_id),
            _attribute("kvbus.mode", story.mode),
            _attribute("kvbus.outcome", story.outcome),
            _attribute("kvbus.prefill_id", story.prefill_id),
            _attribute("kvbus.decode_id", story.decode_id),
        ],
    }
    return [root, *(_stage_span(story, stage, trace_id, root_id) for stage in story.stages()[1:])]


def _stage_span(story: Story, stage: Stage, trace_id: str, root_id: str) -> Json:
    end_s = story.began_s + stage.at_ms / 1000
    span_id = _digest(f"{story.transfer_id} {stage.name}", 16)
    span = _span(trace_id, span_id, f"kvbus.{stage.name.replace(' ', '_')}", end_s - stage.took_ms / 1000, end_s)
    return span | {"parentSpanId": root_id}


def _span(trace_id: str, span_id: str, name: str, start_s: float, end_s: float) -> Json:
    times = {"startTimeUnixNano": _nano(start_s), "endTimeUnixNano": _nano(end_s)}
    return {"traceId": trace_id, "spanId": span_id, "name": name, "kind": 1} | times


def _nano(at_s: float) -> str:
    return str(round(at_s * US) * 1000)


def _attribute(key: str, value: str) -> Json:
    return {"key": key, "value": {"stringValue": value}}


def _digest(text: str, chars: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=chars // 2).hexdigest()
