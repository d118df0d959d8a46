"""What a replay has found, as lines and as JSON. Pure."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from kvbus.replay.compare import Difference, Report
from kvbus.replay.model import Estimate, Judged
from kvbus.replay.recording import Recording
from kvbus.replay.router import PolicyReport
from kvbus.trace.phrases import phrase_of
from kvbus_schemas import RouteDecided

DIFFERENCES_SHOWN = 20
STORY_LINES_MAX = 40
SAID = {"missing": "recorded, not replayed", "extra": "replayed, not recorded", "changed": "not as recorded"}


def report_lines(recording: Recording, report: Report, against: str) -> Iterator[str]:
    """The summary, then each difference with the story of its transfer."""
    yield (
        f"{against}: {report.inputs} messages in, {report.decisions} recorded decisions, "
        f"{len(report.differences)} {'differs' if len(report.differences) == 1 else 'differ'}"
    )
    for count, text in (
        (report.unheard, "decided now, while no such process was there to say so"),
        (report.crossed, "transfers whose messages crossed on their way: no difference in the other order"),
        (report.before, "recorded decisions about what began before the recording"),
    ):
        if count:
            yield f"  {count} {text}"
    yield from _difference_lines(recording, report.differences)


def _difference_lines(recording: Recording, differences: list[Difference]) -> Iterator[str]:
    for difference in differences[:DIFFERENCES_SHOWN]:
        decision = difference.decision
        yield ""
        yield f"{decision.key}  {SAID[difference.kind]}: to {decision.to}, {_phrase(difference)}"
        for name, (then, now) in difference.fields.items():
            yield f"    {name}: recorded {_short(then)}, replayed {_short(now)}"
        yield from _story_lines(recording, decision.key)
    if len(differences) > DIFFERENCES_SHOWN:
        yield f"and {len(differences) - DIFFERENCES_SHOWN} more: see --json"


def _story_lines(recording: Recording, key: str) -> Iterator[str]:
    story = recording.story(key)
    for line in story[:STORY_LINES_MAX]:
        offset_ms = (line.at_s - story[0].at_s) * 1000
        yield f"      {offset_ms:10.2f} ms  {line.sender} -> {line.to}  {phrase_of(line.message)}"
    if len(story) > STORY_LINES_MAX:
        yield f"      and {len(story) - STORY_LINES_MAX} more messages"


def policy_lines(recording: Recording, report: PolicyReport, name: str, judged: Judged | None) -> Iterator[str]:
    """How often a policy chooses otherwise, and what that would have done."""
    asked = len(report.answers)
    otherwise = len(report.differences)
    yield f"router: policy {name} asked {asked} questions, {otherwise} answered otherwise, {report.ties} ties"
    if report.by_guests:
        yield f"  {report.by_guests} more were decided by guests on the bus, which are not here to be asked"
    if judged is None:
        yield from _difference_lines(recording, report.differences)
        return
    yield f"  {_changes(report)}"
    yield f"{'':12}  {'TTFT mean':>10}  {'TTFT p50':>10}  {'hit rate':>8}  {'prefills':>8}  {'decodes':>8}"
    for label, estimate in (("measured", judged.measured), ("model", judged.own), (name, judged.other)):
        yield f"{label[:12]:12}  {_estimate(estimate)}"
    yield (
        f"the model is off by {judged.error_ms:.1f} ms a request ({judged.error_share:.0%}) on requests that it was "
        "not fitted to; a smaller difference between policies says nothing"
    )
    yield (
        f"  TTFT = {judged.fit['a_ms']:.2f} ms + {judged.fit['b_ms_per_kib']:.2f} ms per KiB of prompt "
        f"+ {judged.fit['c_ms_per_queued_kib']:.2f} ms per KiB queued, over {judged.measured.requests} requests"
    )
    yield "  prefills, decodes: requests of the busiest one over the mean; hit rate: of turns after the first"


def _changes(report: PolicyReport) -> str:
    fields = Counter(name for difference in report.differences for name in difference.fields)
    return "otherwise: " + (", ".join(f"{name} {count}" for name, count in fields.most_common()) or "nothing")


def _estimate(estimate: Estimate) -> str:
    hits = "-" if estimate.hit_rate is None else f"{estimate.hit_rate:.0%}"
    return (
        f"{estimate.ttft_ms_mean:>7.1f} ms  {estimate.ttft_ms_p50:>7.1f} ms  {hits:>8}  "
        f"{estimate.prefill_balance:>8.2f}  {estimate.decode_balance:>8.2f}"
    )


def report_json(recording: Recording, report: Report, against: str) -> dict[str, Any]:
    """A report as `--json` prints it."""
    counts = {
        "inputs": report.inputs,
        "decisions": report.decisions,
        "unheard": report.unheard,
        "crossed": report.crossed,
        "before": report.before,
    }
    found = [_difference_json(recording, difference) for difference in report.differences]
    return {"against": against} | counts | {"differences": found}


def policy_json(recording: Recording, report: PolicyReport, name: str, judged: Judged | None) -> dict[str, Any]:
    """A policy report as `--json` prints it."""
    return {
        "against": "router",
        "policy": name,
        "asked": len(report.answers),
        "ties": report.ties,
        "by_guests": report.by_guests,
        "differences": [_difference_json(recording, difference) for difference in report.differences],
        "estimate": None if judged is None else msgspec.to_builtins(judged),
    }


def _difference_json(recording: Recording, difference: Difference) -> dict[str, Any]:
    decision = difference.decision
    return {
        "kind": difference.kind,
        "key": decision.key,
        "to": decision.to,
        "type": type(decision.message).__name__,
        "what": _phrase(difference),
        "fields": {name: {"recorded": then, "replayed": now} for name, (then, now) in difference.fields.items()},
        "story": [
            {"at_s": line.at_s, "from": line.sender, "to": line.to, "what": phrase_of(line.message)}
            for line in recording.story(decision.key)
        ],
    }


def _phrase(difference: Difference) -> str:
    message: Any = difference.decision.message
    who = f"request {message.request_id}, " if isinstance(message, RouteDecided) else ""
    return who + phrase_of(message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."  # noqa: PLR2004  (a line of a terminal)
