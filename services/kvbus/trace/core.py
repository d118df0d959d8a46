"""Messages to stories: what became of each request, and where its time went. Pure.

A story is one dispatch: everything about one `transfer_id`, the transfers of its parts (`<transfer_id>-<digest>`) and
of the reuse that it was granted included. Times are the stream's own stamps, so that one clock measures it all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    PushDone,
    PushOrdered,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseWithdrawn,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
    TransferClosed,
)

TRANSFER_ID_CHARS = 32
OUTCOMES = ("completed", "failed", "cancelled", "expired", "retried", "open")
CRITICAL_SHARE = 0.25
"""A stage that takes this share of the time to first byte, or more, is critical."""
_WORST_FIRST = ("failed", "expired", "cancelled", "completed")


class Line(NamedTuple):
    """One message as the stream kept it. `at_s` is seconds since 1970 on the stream's clock."""

    seq: int
    at_s: float
    sender: str
    to: str
    message: AnyMessage


class Stage(NamedTuple):
    """A point that a request passed: when, after its first message, and how long after the stage before it."""

    name: str
    at_ms: float
    took_ms: float


class Share(NamedTuple):
    """What part of the time up to the first byte, or up to the last stage where there is none yet, a stage took: 0 to
    1, and 0 after it."""

    stage: Stage
    share: float
    critical: bool


@dataclass(slots=True)
class Story:
    """One dispatch of one request."""

    transfer_id: str
    request_id: str = ""
    conversation: str = ""
    mode: str = ""
    prefill_id: str = ""
    decode_id: str = ""
    status: int = 0
    attempt: int = 1
    ttft_ms: float = 0.0
    duration_ms: float = 0.0
    served: str = ""
    closed: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def began_s(self) -> float:
        """When its first message was stored."""
        return self.lines[0].at_s

    @property
    def outcome(self) -> str:
        """What the client got; before that is known, how the worst of its transfers ended; else open."""
        return self.served or next((outcome for outcome in _WORST_FIRST if outcome in self.closed), "open")

    def has_engine(self, engine_id: str) -> bool:
        """True if that engine took part."""
        return engine_id in (self.prefill_id, self.decode_id) or any(
            engine_id in (line.sender, line.to) for line in self.lines
        )

    def stages(self) -> list[Stage]:
        """The points that this request passed, in the order of time."""
        points = sorted(_points(self), key=lambda point: point[1])
        stages: list[Stage] = []
        for name, at_s in points:
            at_ms = (at_s - self.began_s) * 1000
            stages.append(Stage(name, at_ms, at_ms - stages[-1].at_ms if stages else 0.0))
        return stages

    def shares(self) -> list[Share]:
        """The stages, each with its share, and those marked that the time went into."""
        stages = self.stages()
        if not stages:
            return []
        whole_ms = next((stage.at_ms for stage in stages if stage.name == "first byte"), stages[-1].at_ms)
        found = []
        for stage in stages:
            share = stage.took_ms / (whole_ms or 1.0) if stage.at_ms <= whole_ms else 0.0
            found.append(Share(stage, share, share >= CRITICAL_SHARE))
        return found


def line_of(seq: int, at_s: float, subject: str, message: AnyMessage) -> Line:
    """A line out of what the stream holds."""
    sender, to = subject.split(".")[4:6]
    return Line(seq, at_s, sender, to, message)


def stories_of(lines: Iterable[Line]) -> list[Story]:
    """The stories in these lines, oldest first. Lines that belong to none (loads, cards, offers) are left out."""
    ordered = sorted(lines, key=lambda line: line.seq)
    owners = _Owners(ordered)
    stories: dict[str, Story] = {}
    for line in ordered:
        transfer_id = owners.of(line.message)
        if transfer_id:
            story = stories.setdefault(transfer_id, Story(transfer_id))
            story.lines.append(line)
            _learn(story, line.message)
    return list(stories.values())


class _Owners:
    """Which dispatch a message belongs to, where its key is not that dispatch's transfer_id."""

    def __init__(self, lines: list[Line]) -> None:
        self._by_request: dict[str, str] = {}
        self._by_ask: dict[str, str] = {}
        self._by_reuse: dict[str, str] = {}
        self._by_conversation: dict[str, str] = {}
        dispatches: set[str] = set()
        for line in lines:
            if isinstance(line.message, RouteDecided):
                self._by_request.setdefault(line.message.request_id, line.message.transfer_id)
                dispatches.add(line.message.transfer_id)
        for line in lines:
            if isinstance(line.message, RouteAsked):
                asked = line.message
                known = asked.transfer_id in dispatches
                self._by_ask[asked.ask_id] = asked.transfer_id if known else self._by_request.get(asked.request_id, "")
            elif isinstance(line.message, BlocksRegistered) and line.message.reuse:
                key = line.message.transfer_id
                self._by_reuse[key] = self._by_request.get(line.message.request_id, key[:TRANSFER_ID_CHARS])

    def of(self, message: AnyMessage) -> str:
        """The transfer_id of the dispatch, or empty. Call it in the order of time: what is said of a conversation
        belongs to its latest turn."""
        match message:
            case RouteAsked() | RouteAnswered():
                return self._by_ask.get(message.ask_id, "")
            case ReuseAsked():
                owner = self._by_request.get(message.request_id, "")
            case ReuseAnswered() | ReuseOffered() | ReuseWithdrawn():
                owner = self._by_conversation.get(message.conversation, "")
                if owner and isinstance(message, ReuseAnswered) and message.grant is not None:
                    self._by_reuse.setdefault(message.grant.transfer_id, owner)  # it may be released unused
                return owner
            case _:
                key = getattr(message, "transfer_id", "")
                owner = self._by_reuse.get(key, key[:TRANSFER_ID_CHARS])
        conversation = getattr(message, "conversation", "")
        if owner and conversation:
            self._by_conversation[conversation] = owner
        return owner


def _learn(story: Story, message: AnyMessage) -> None:
    """Take from a message what the summary of a story says."""
    match message:
        case RouteDecided():
            story.mode, story.attempt = message.mode, message.attempt
            story.prefill_id = message.prefill_id or story.prefill_id
            story.decode_id = message.decode_id or story.decode_id
        case RequestServed():
            story.mode, story.served, story.status = message.mode, message.outcome, message.status
            story.ttft_ms, story.duration_ms, story.attempt = message.ttft_ms, message.duration_ms, message.attempt
        case BlocksRegistered() if not message.reuse:
            story.prefill_id = story.prefill_id or message.producer_id
            story.decode_id = story.decode_id or message.consumer_id
        case TransferClosed():
            story.closed.append(message.outcome)
        case _:
            pass
    story.request_id = story.request_id or getattr(message, "request_id", "")
    story.conversation = story.conversation or getattr(message, "conversation", "")


_FIRST_OF: tuple[tuple[type[AnyMessage], str], ...] = (
    (RouteDecided, "routed"),
    (BlocksRegistered, "registered"),
    (PushOrdered, "ordered"),
)
_LAST_OF: tuple[tuple[type[AnyMessage], str], ...] = (
    (BlocksReady, "prefill ready"),
    (PushDone, "last push done"),
    (TransferClosed, "closed"),
)


def _points(story: Story) -> list[tuple[str, float]]:
    points: list[tuple[str, float]] = []
    for kind, name in (*_FIRST_OF, *_LAST_OF):
        times = [line.at_s for line in story.lines if isinstance(line.message, kind)]
        if times:
            points.append((name, times[0] if (kind, name) in _FIRST_OF else times[-1]))
    for line in story.lines:
        served = line.message
        if isinstance(served, RequestServed) and served.ttft_ms > 0:
            points.append(("first byte", line.at_s - (served.duration_ms - served.ttft_ms) / 1000))
            break
    return points


class AmbiguousIdError(ValueError):
    """A prefix that several things begin with."""

    def __init__(self, given: str, found: list[str]) -> None:
        some = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")  # noqa: PLR2004  (enough to choose from)
        super().__init__(f"{given!r} is the beginning of {len(found)} ids: {some}")


def named(stories: list[Story], given: str) -> list[Story]:
    """The stories of one request, transfer or conversation, by its id or an unambiguous beginning of it.

    Raises AmbiguousIdError; an empty list means that there is no such id.
    """
    ids = {name for story in stories for name in ids_of(story) if name.startswith(given)}
    if given in ids:
        ids = {given}
    meant = {name: [story for story in stories if name in ids_of(story)] for name in sorted(ids)}
    choices = {tuple(story.transfer_id for story in found) for found in meant.values()}
    if len(choices) > 1:
        raise AmbiguousIdError(given, sorted(ids))
    return next(iter(meant.values()), [])


def ids_of(story: Story) -> list[str]:
    """All names under which the story can be asked for."""
    keys = {line.message.transfer_id for line in story.lines if isinstance(line.message, BlocksRegistered)}
    return [name for name in (story.transfer_id, story.request_id, story.conversation, *sorted(keys)) if name]


def matching(
    stories: list[Story], *, engine_id: str = "", outcome: str = "", slow_ms: float = 0.0, limit: int = 0
) -> list[Story]:
    """The stories that pass every filter that is given, newest first. Slow is by time to first byte, or by the whole
    duration where there was no first byte."""
    found = [
        story
        for story in sorted(stories, key=lambda story: story.began_s, reverse=True)
        if (not engine_id or story.has_engine(engine_id))
        and (not outcome or story.outcome == outcome)
        and (not slow_ms or (story.ttft_ms or story.duration_ms) >= slow_ms)
    ]
    return found[:limit] if limit else found
