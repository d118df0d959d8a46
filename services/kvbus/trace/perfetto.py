"""The trace as Perfetto's viewer reads it: Chrome's trace-event format. Pure.

A process of kvbus is a process there, and a transfer a thread of it, more than one where its slices do not nest: what
overlaps otherwise is dropped, and so is a flow that is on no slice. So every message is a slice of its sender, as long
as what it reports has taken, a short one of its receiver, and a flow from one to the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvbus.trace.core import Line, Story
from kvbus.trace.phrases import phrase_of
from kvbus_schemas import EVERYONE, BlocksReady, PushDone, RequestServed, TransferClosed

Json = dict[str, Any]
US = 1_000_000
SHORT_US = 2
"""Length of a slice that only says something."""
NAME_CHARS = 12


def took_ms(line: Line) -> float:
    """How long what a message reports has taken, in milliseconds, up to the message; 0 for what reports nothing."""
    match line.message:
        case RequestServed():
            return line.message.duration_ms
        case BlocksReady():
            return line.message.computed_ms
        case PushDone():
            return line.message.duration_ms
        case TransferClosed():
            return line.message.waited_ms
        case _:
            return 0.0


@dataclass(slots=True)
class _Slice:
    """Times in whole microseconds since 1970; a flow begins or ends at `flow_us`, on the slice."""

    process: str
    start_us: int
    end_us: int
    line: Line
    received: bool = False

    @property
    def flow_us(self) -> int:
        return self.start_us + 1 if self.received else self.end_us - 1


@dataclass(slots=True)
class _Document:
    """Numbers of processes and threads, and the events so far."""

    processes: dict[str, int] = field(default_factory=dict)
    threads: int = 0
    names: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)

    def pid(self, process: str) -> int:
        number = self.processes.get(process)
        if number is None:
            number = self.processes[process] = len(self.processes) + 1
            self._name("process_name", number, 0, process)
        return number

    def thread(self, pid: int, name: str) -> int:
        self.threads += 1
        self._name("thread_name", pid, self.threads, name)
        return self.threads

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self.names.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})


def perfetto(stories: Iterable[Story]) -> Json:
    """The document. Nothing is left out: a message of a story is a slice, and a flow if it is for somebody."""
    document = _Document()
    for story in stories:
        for process, slices in _by_process(story).items():
            pid = document.pid(process)
            for lane in _lanes(slices):
                tid = document.thread(pid, (story.request_id or story.transfer_id)[:NAME_CHARS])
                for one in lane:
                    document.events += _events(story, one, pid, tid)
    return {"displayTimeUnit": "ms", "traceEvents": document.names + document.events}


def _by_process(story: Story) -> dict[str, list[_Slice]]:
    found: dict[str, list[_Slice]] = {}
    for line in story.lines:
        at_us = round(line.at_s * US)
        long_us = round(took_ms(line) * 1000)
        start_us, end_us = (at_us - long_us, at_us) if long_us >= SHORT_US else (at_us, at_us + SHORT_US)
        sent = _Slice(line.sender, start_us, end_us, line)
        found.setdefault(line.sender, []).append(sent)
        if line.to != EVERYONE:
            received = _Slice(line.to, at_us + SHORT_US, at_us + 2 * SHORT_US, line, received=True)
            found.setdefault(line.to, []).append(received)
    return found


def _lanes(slices: list[_Slice]) -> list[list[_Slice]]:
    """The slices in lanes: in each, any two lie one within the other, or apart."""
    lanes: list[_Lane] = []
    for one in sorted(slices, key=lambda slice_: (slice_.start_us, -slice_.end_us)):
        if not any(lane.takes(one) for lane in lanes):
            lanes.append(_Lane([one], [one.end_us]))
    return [lane.slices for lane in lanes]


@dataclass(slots=True)
class _Lane:
    slices: list[_Slice]
    open_until_us: list[int]

    def takes(self, one: _Slice) -> bool:
        """Take the slice if it fits."""
        ends = self.open_until_us
        while ends and ends[-1] <= one.start_us:
            ends.pop()
        if ends and one.end_us > ends[-1]:
            return False
        self.slices.append(one)
        ends.append(one.end_us)
        return True


def _events(story: Story, one: _Slice, pid: int, tid: int) -> list[Json]:
    message = one.line.message
    name = type(message).__name__
    where = {"pid": pid, "tid": tid}
    said = {"what": phrase_of(message), "request": story.request_id, "transfer": message.key}
    category = {"name": f"hears {name}" if one.received else name, "cat": type(message).PLANE}
    events: list[Json] = [
        {"ph": "X", "ts": one.start_us, "dur": one.end_us - one.start_us, "args": said} | category | where
    ]
    if one.line.to != EVERYONE:
        flow = {"ph": "f", "bp": "e"} if one.received else {"ph": "s"}
        events.append({"name": name, "cat": "message", "id": one.line.seq, "ts": one.flow_us} | flow | where)
    return events
