"""Where the time to first token went: the stages of one request, one after the other, that add up to it. Pure.

    arrival ─wait─ asks for KV ─reuse_ask─ answered ─route─ chosen ─prefill_queue─ first blocks ─reuse_take─ taken
      ─prefill─ last forward pass ─handoff─ landed ─start─ first byte

Times are the stream's stamps, put back by what the messages themselves say has passed since. A point that lies before
its predecessor (decode had the prefix, nothing was taken back) makes a stage of no length.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from kvbus.trace.core import Line, Story
from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    PushDone,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    RouteDecided,
    TransferClosed,
)

STAGES = ("wait", "reuse_ask", "route", "prefill_queue", "reuse_take", "prefill", "handoff", "start")

M = TypeVar("M", bound=AnyMessage)


class Split(NamedTuple):
    """The time to first token, and how long each stage took, in milliseconds, in the order of STAGES."""

    ttft_ms: float
    stages: dict[str, float]


def split_of(story: Story) -> Split | None:
    """The stages of a request; None where it had no first byte, was dispatched before, or had no prefill of its own."""
    served = next((message for _, message in _all(story, RequestServed)), None)
    decided = next(_all(story, RouteDecided), None)
    ready = next(_all(story, BlocksReady), None)
    if served is None or decided is None or ready is None or not served.ttft_ms or served.attempt > 1:
        return None
    chosen_s = decided[0].at_s
    arrival_s = min(chosen_s - decided[1].after_ms / 1e3, *(line.at_s for line, _ in _all(story, ReuseAsked)), chosen_s)
    if decided[1].after_ms:  # the stamp is late by what it took to send the choice
        chosen_s = min(chosen_s, arrival_s + decided[1].after_ms / 1e3)
    first_byte_s = arrival_s + served.ttft_ms / 1e3
    stages: dict[str, float] = {}
    before_s = arrival_s
    for name, at_s in zip(STAGES, _ends(story, chosen_s, ready, first_byte_s), strict=True):
        end_s = min(max(at_s, before_s), first_byte_s)
        stages[name] = (end_s - before_s) * 1e3
        before_s = end_s
    return Split(served.ttft_ms, stages)


def _ends(
    story: Story, chosen_s: float, ready: tuple[Line, BlocksReady], first_byte_s: float
) -> tuple[float, float, float, float, float, float, float, float]:
    """When each stage ended."""
    taken = {message.transfer_id for _, message in _all(story, BlocksRegistered) if message.reuse}
    asked_s = next((line.at_s for line, _ in _all(story, ReuseAsked)), None)
    answered_s = next((line.at_s for line, _ in _all(story, ReuseAnswered)), asked_s)
    decided_us = next(message.decided_us for _, message in _all(story, RouteDecided))
    asking_s = chosen_s - decided_us / 1e6 if asked_s is None else asked_s
    admitted_s = ready[0].at_s - ready[1].computed_ms / 1e3
    closes = list(_all(story, TransferClosed))
    back_s = max((line.at_s for line, closed in closes if closed.transfer_id in taken), default=admitted_s)
    pushed = [(line, done) for line, done in _all(story, PushDone) if done.transfer_id not in taken]
    final_s = max((line.at_s - done.handoff_ms / 1e3 for line, done in pushed), default=ready[0].at_s)
    landed_s = max(
        (line.at_s - closed.start_ms / 1e3 for line, closed in closes if closed.transfer_id not in taken),
        default=final_s,
    )
    return (asking_s, answered_s or asking_s, chosen_s, admitted_s, back_s, final_s, landed_s, first_byte_s)


def _all(story: Story, kind: type[M]) -> Iterator[tuple[Line, M]]:
    for line in story.lines:
        if isinstance(line.message, kind):
            yield line, line.message
