"""A request as the page shows it: as a row, as a waterfall with the decisions behind it, as a turn. Pure.

Texts, stages and shares come from `kvbus.trace`, so that page and command line never disagree.
"""

from typing import Any

from kvbus.trace.core import Story
from kvbus.trace.export import took_ms
from kvbus.trace.phrases import phrase_of
from kvbus.trace.render import ranked, summary
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    Candidate,
    EngineView,
    PushDone,
    PushOrdered,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
    TransferClosed,
)

Json = dict[str, Any]
LINES_SHOWN_MAX = 400
CANDIDATES_SHOWN_MAX = 200
_DOING: dict[str, str] = {
    "": "asked",
    "routed": "routed",
    "registered": "prefill",
    "ordered": "prefill",
    "prefill ready": "writing",
    "last push done": "landing",
    "closed": "decode",
}
"""What a request that has passed this stage, and is not over, is waiting for."""


def running_row(story: Story) -> Json:
    """A dispatch under way."""
    return _row(story) | {"stage": _doing(story)}


def finished_row(story: Story) -> Json:
    """A dispatch that is over."""
    times = {"ttft_ms": round(story.ttft_ms, 2), "duration_ms": round(story.duration_ms, 2)}
    return _row(story) | times | {"outcome": story.outcome, "status": story.status}


def _row(story: Story) -> Json:
    return {
        "id": story.transfer_id,
        "request": story.request_id,
        "conversation": story.conversation,
        "mode": story.mode,
        "prefill": story.prefill_id,
        "decode": story.decode_id,
        "began": round(story.began_s, 3),
        "attempt": story.attempt,
        "reuse": reuse_of(story)["word"],
    }


def _doing(story: Story) -> str:
    stages = story.stages()
    return _DOING.get(stages[-1].name if stages else "", stages[-1].name if stages else "")


def reuse_of(story: Story) -> Json:
    """What became of the conversation's KV: `word` is hit, miss, released or empty, `why` says more."""
    messages = [line.message for line in story.lines]
    answer = next((message for message in messages if isinstance(message, ReuseAnswered)), None)
    if answer is None:
        asked = any(isinstance(message, ReuseAsked) for message in messages)
        return {
            "word": "miss" if asked and story.served else "",
            "why": "no answer in time" if asked else "",
            "tokens": 0,
        }
    if answer.grant is None:
        return {"word": "miss", "why": (answer.miss or "unknown").replace("_", " "), "tokens": 0}
    released = next((message.reason for message in messages if isinstance(message, ReuseReleased)), "")
    took = any(isinstance(message, BlocksRegistered) and message.reuse for message in messages)
    if released and not took:
        return {"word": "released", "why": released.replace("_", " "), "tokens": 0}
    why = f"from {answer.grant.holder_id}, {answer.age_s:.1f} s old"
    return {"word": "hit", "why": why, "tokens": answer.grant.token_count}


def detail(story: Story) -> Json:
    """All about one dispatch."""
    shown = story.lines[:LINES_SHOWN_MAX]
    return {
        "summary": summary(story) | {"running": not story.served},
        "reuse": reuse_of(story),
        "stages": stage_rows(story),
        "lines": [
            {
                "ms": round((line.at_s - story.began_s) * 1000, 3),
                "took_ms": round(took_ms(line), 3),
                "from": line.sender,
                "to": line.to,
                "type": type(line.message).__name__,
                "plane": line.message.PLANE,
                "what": phrase_of(line.message),
            }
            for line in shown
        ],
        "lines_left_out": len(story.lines) - len(shown),
        "decisions": [_decision(line.message) for line in story.lines if isinstance(line.message, RouteDecided)],
        "answers": _answers(story),
    }


def stage_rows(story: Story) -> list[Json]:
    """The stages up to the first byte and after it; `critical` are those that its time went into."""
    return [
        {
            "stage": share.stage.name,
            "ms": round(share.stage.at_ms, 3),
            "took_ms": round(share.stage.took_ms, 3),
            "share": round(share.share, 4),
            "critical": share.critical,
        }
        for share in story.shares()
    ]


def _decision(decided: RouteDecided) -> Json:
    views = {view.engine_id: view for view in decided.engines}
    candidates = ranked(decided)
    return {
        "what": phrase_of(decided),
        "mode": decided.mode,
        "asked": decided.asked or "",
        "policy": decided.policy,
        "reason": decided.reason,
        "attempt": decided.attempt,
        "decided_us": decided.decided_us,
        "canary": decided.canary,
        "prompt_bytes": decided.prompt_bytes,
        "candidates": [_candidate(one, decided, views.get(one.engine_id)) for one in candidates[:CANDIDATES_SHOWN_MAX]],
        "left_out": max(0, len(candidates) - CANDIDATES_SHOWN_MAX) + decided.engines_left_out,
    }


def _candidate(candidate: Candidate, decided: RouteDecided, view: EngineView | None) -> Json:
    chosen = candidate.engine_id == (decided.prefill_id if candidate.role == "prefill" else decided.decode_id)
    known = "" if view is None else f"{view.running} running, {view.waiting} waiting, {view.free_blocks} blocks free"
    return {
        "id": candidate.engine_id,
        "role": candidate.role,
        "score": round(candidate.score, 4),
        "terms": [[name, round(value, 4)] for name, value in candidate.terms.items()],
        "load_age_ms": round(candidate.load_age_ms, 1),
        "known": known,
        "chosen": chosen,
    }


def _answers(story: Story) -> list[Json]:
    """What routers on the bus answered, also those whose answer is only compared (shadow)."""
    asked = {line.message.ask_id: line.message for line in story.lines if isinstance(line.message, RouteAsked)}
    return [
        {
            "from": line.sender,
            "shadow": message.ask_id in asked and asked[message.ask_id].shadow,
            "mode": message.mode,
            "prefill": message.prefill_id,
            "decode": message.decode_id,
            "same": (message.prefill_id, message.decode_id) == (story.prefill_id, story.decode_id),
            "reason": message.reason,
        }
        for line in story.lines
        if isinstance(message := line.message, RouteAnswered)
    ]


def turn(story: Story) -> Json:
    """A dispatch as a turn of its conversation."""
    tokens = cached = moved = 0
    kept = ""
    for message in (line.message for line in story.lines):
        match message:
            case BlocksRegistered() | PushOrdered() if not message.reuse:
                tokens = max(tokens, message.token_count)
            case BlocksReady():
                cached = max(cached, message.cached_tokens)
            case PushDone():
                moved += message.bytes
            case ReuseOffered() | ReuseWithdrawn():
                kept = phrase_of(message)
            case _:
                pass
    closed = next((line.message for line in story.lines if isinstance(line.message, TransferClosed)), None)
    return finished_row(story) | {
        "reuse": reuse_of(story),
        "tokens": tokens,
        "cached": cached,
        "moved_bytes": moved,
        "kept": kept,
        "closed": closed.outcome if closed else "",
        "running": not story.served,
    }
