"""Messages in, counts out: gaps, kinds, outcomes, and where each request's time to first token went. Pure.

A request's lines are kept until it has been served, and GRACE_S longer, since a prefill or a matcher may have its last
word after the router's; then they become a story, and the story is split into stages.
"""

from collections import OrderedDict

from kvbus.bus.gaps import GapDetector
from kvbus.metrics.tally import Tally
from kvbus.trace.core import TRANSFER_ID_CHARS, Line, stories_of
from kvbus.trace.split import split_of
from kvbus_schemas import (
    BlocksRegistered,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    RouteDecided,
    TransferClosed,
)

GRACE_S = 1.0
REQUESTS_MAX = 10_000
"""Requests under way; the one that began longest ago is forgotten beyond it."""
OWNERS_MAX = 4 * REQUESTS_MAX
PROCESSES = ("router", "matcher", "reuse", "console", "observer")
"""Processes whose names begin with what they are and end with a random word; whoever else speaks is an engine."""

ENGINE = "engine"


def process_of(sender: str) -> str:
    """What kind of process has that name: few values, so that they may be a label."""
    kind = sender.split("-", maxsplit=1)[0]
    return kind if kind in PROCESSES else ENGINE


class _Bounded(OrderedDict[str, str]):
    """Forgets what was put first."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        if len(self) > OWNERS_MAX:
            self.popitem(last=False)


class ObserverCore:
    """Feed it the trace in its order; everything it counts is in `tally`."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._gaps = GapDetector()
        self._lines: OrderedDict[str, list[Line]] = OrderedDict()
        """By request id."""
        self._owner = _Bounded()
        """Request id of a transfer, or of a conversation's latest turn."""
        self._due: OrderedDict[str, float] = OrderedDict()
        """Requests that have been served, and when to look at them."""
        for process in (*PROCESSES, ENGINE):  # from the start, so that the first one is an increase
            tally.add("kvbus_observer_missing_messages", process, by=0)
            tally.add("kvbus_observer_dead_letters", process, by=0)

    @property
    def stories(self) -> int:
        """Requests under way."""
        return len(self._lines) - len(self._due)

    def hear(self, line: Line) -> None:
        """Take one line."""
        message = line.message
        self.tally.add("kvbus_observer_messages", type(message).PLANE, type(message).__name__)
        missing = self._gaps.observe(message)
        if missing:
            self.tally.add("kvbus_observer_missing_messages", process_of(line.sender), by=missing)
        self._count(line)
        request_id = self._request_of(line)
        if request_id:
            self._keep(request_id, line)
        if isinstance(message, RequestServed):
            self._due[request_id] = line.at_s + GRACE_S

    def tick(self, now_s: float) -> None:
        """Split the requests that are over; `now_s` is on the clock of the lines."""
        while self._due:
            request_id, due_s = next(iter(self._due.items()))
            if due_s > now_s:
                return
            del self._due[request_id]
            for story in stories_of(self._lines.pop(request_id, ())):
                split = split_of(story)
                if split is None:
                    continue
                self.tally.observe("kvbus_observer_ttft_seconds", split.ttft_ms / 1e3)
                for stage, took_ms in split.stages.items():
                    self.tally.observe("kvbus_observer_stage_seconds", took_ms / 1e3, stage)

    def _count(self, line: Line) -> None:
        match line.message:
            case RequestServed() as served:
                self.tally.add("kvbus_observer_requests", served.mode, served.outcome)
            case TransferClosed() as closed:
                self.tally.add("kvbus_observer_transfers", closed.outcome)
            case ReuseAnswered() as answered:
                result = "hit" if answered.grant is not None else answered.miss or "unavailable"
                self.tally.add("kvbus_observer_reuse_answers", result)
            case _:
                pass

    def _request_of(self, line: Line) -> str:
        """The request that a line belongs to, or empty."""
        message = line.message
        match message:
            case RouteDecided() | RequestServed():
                self._owner[message.transfer_id] = message.request_id
                return message.request_id
            case ReuseAsked():
                self._owner[message.conversation] = message.request_id
                return message.request_id
            case ReuseAnswered():
                return self._owner.get(message.conversation, "")
            case BlocksRegistered() if message.reuse and message.request_id:
                self._owner[message.transfer_id] = message.request_id
                return message.request_id
            case _:
                key = getattr(message, "transfer_id", "")
                return self._owner.get(key) or self._owner.get(key[:TRANSFER_ID_CHARS], "")

    def _keep(self, request_id: str, line: Line) -> None:
        lines = self._lines.get(request_id)
        if lines is None:
            lines = self._lines[request_id] = []
            if len(self._lines) > REQUESTS_MAX:
                oldest, _ = self._lines.popitem(last=False)
                self._due.pop(oldest, None)
        lines.append(line)
