"""The requests of the last minutes, as they happen. Pure.

What belongs together is found from each message as it comes; what it means is left to `kvbus.trace.core`, which makes
the stories of a request whenever something new was said about it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbus.trace.core import TRANSFER_ID_CHARS, Line, Story, stories_of
from kvbus_schemas import (
    AnyMessage,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseWithdrawn,
    RouteAsked,
    RouteDecided,
    TransferClosed,
)

LINES_MAX = 1000
"""Messages of one request that are kept, the first."""
LOST_S = 900.0
"""A request of which nothing was heard for so long will never end here: its router is gone."""
STRAY_S = 30.0
"""A transfer that no router spoke of (its beginning was not heard) is over so long after its last word."""
SWEEP_EVERY = 100

Name = tuple[str, str]
"""(request, transfer, ask or conversation; its id)."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, with all its dispatches."""

    number: int
    lines: list[Line] = field(default_factory=list)
    names: set[Name] = field(default_factory=set)
    over: bool = False
    troubled: bool = False
    heard_s: float = 0.0
    _stories: list[Story] | None = None

    @property
    def stories(self) -> list[Story]:
        """One for each dispatch, oldest first."""
        if self._stories is None:
            self._stories = stories_of(self.lines)
        return self._stories

    def take(self, line: Line) -> bool:
        """False when it was heard before."""
        if any(line.message == known.message for known in self.lines):
            return False
        self.heard_s = max(self.heard_s, line.at_s)
        if len(self.lines) < LINES_MAX or isinstance(line.message, RequestServed):
            self.lines.append(line)
            self._stories = None
        if isinstance(line.message, RequestServed):
            self.over = line.message.outcome != "retried"
            self.troubled |= line.message.outcome != "completed"
        if isinstance(line.message, TransferClosed):
            self.troubled |= line.message.outcome in ("failed", "expired")
        return True


class Book:
    """Requests by everything that they are called. Feed it in the order in which things were said."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._requests: dict[int, Request] = {}
        self._by_name: dict[Name, Request] = {}
        self._latest: dict[str, Request] = {}
        """By conversation: its latest turn."""
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._requests)

    def hear(self, line: Line) -> bool:
        """Take a message; False when it was heard before."""
        names = _names_of(line.message)
        conversation = getattr(line.message, "conversation", "")
        request = self._owner(line.message, names)
        if request is None and isinstance(line.message, ReuseOffered | ReuseAnswered | ReuseWithdrawn):
            request = self._latest.get(conversation)
        if request is None and not names:
            return True  # it belongs to no request
        request = request or self._opened()
        if not request.take(line):
            return False
        for name in names:
            self._by_name[name] = request
        request.names.update(names)
        if conversation and names:
            self._latest[conversation] = request
            request.names.add(("conversation", conversation))
        return True

    def stories(self) -> Iterator[Story]:
        """Every dispatch, the oldest request first."""
        for request in self._requests.values():
            yield from request.stories

    def running(self, now_s: float) -> list[Story]:
        """Dispatches that are under way, oldest first."""
        return [
            story
            for request in self._requests.values()
            if not request.over and now_s - request.heard_s < LOST_S
            for story in request.stories
            if not _ended(story, request.heard_s, now_s)
        ]

    def finished(self, now_s: float) -> list[Story]:
        """Dispatches that are over, oldest first."""
        return [
            story
            for request in self._requests.values()
            for story in request.stories
            if request.over or now_s - request.heard_s >= LOST_S or _ended(story, request.heard_s, now_s)
        ]

    def lines_of(self, transfer_id: str) -> list[Line]:
        """All that was said about the request that this dispatch belongs to; empty if it is not known."""
        request = self._by_name.get(("transfer", transfer_id))
        return list(request.lines) if request is not None else []

    def turns(self, conversation: str) -> list[Story]:
        """The dispatches of a conversation, oldest first."""
        name = ("conversation", conversation)
        found = [story for request in self._requests.values() if name in request.names for story in request.stories]
        return sorted(found, key=lambda story: story.began_s)

    def _owner(self, message: AnyMessage, names: list[Name]) -> Request | None:
        """The request that these names mean; what turns out to be one request becomes one."""
        found = {known.number: known for name in names if (known := self._by_name.get(name)) is not None}
        if isinstance(message, RouteDecided | RouteAsked | ReuseAsked):
            found = {number: known for number, known in found.items() if not _used_again(known, message)}
        if not found:
            return None
        first, *others = (found[number] for number in sorted(found))
        for other in others:
            self._merge(first, other)
        return first

    def _merge(self, into: Request, other: Request) -> None:
        """The transfer was heard of before the router had said whose it is."""
        for line in other.lines:
            into.take(line)
        into.names |= other.names
        for name in other.names:
            if name[0] == "conversation" and self._latest.get(name[1]) is other:
                self._latest[name[1]] = into
            self._by_name[name] = into
        del self._requests[other.number]

    def _opened(self) -> Request:
        self._numbers += 1
        request = self._requests[self._numbers] = Request(self._numbers)
        if len(self._requests) > self._requests_max + SWEEP_EVERY:
            self._sweep()
        return request

    def _sweep(self) -> None:
        """Keep the newest, and as many again of the older ones that still run or went wrong."""
        older = list(self._requests.values())[: -self._requests_max]
        kept = [request for request in older if not request.over or request.troubled][-self._requests_max :]
        for request in set(older) - set(kept):
            del self._requests[request.number]
            for name in request.names:
                if self._by_name.get(name) is request:
                    del self._by_name[name]
                if name[0] == "conversation" and self._latest.get(name[1]) is request:
                    del self._latest[name[1]]


def _used_again(known: Request, message: AnyMessage) -> bool:
    """The request that is known is over, and this begins another one to which a client gave the same id."""
    if not known.over or ("transfer", getattr(message, "transfer_id", "")) in known.names:
        return False
    return all(message != line.message for line in known.lines)


def _ended(story: Story, heard_s: float, now_s: float) -> bool:
    """The router has said how it ended; or no router spoke of it, and nobody has since."""
    if story.served:
        return True
    return now_s - heard_s > STRAY_S and not any(isinstance(line.message, RouteDecided) for line in story.lines)


def _names_of(message: AnyMessage) -> list[Name]:
    """What the message calls its request, the surest first."""
    names: list[Name] = []
    transfer_id = getattr(message, "transfer_id", "")
    if transfer_id:
        names += [("transfer", transfer_id), ("transfer", transfer_id[:TRANSFER_ID_CHARS])]
    request_id = getattr(message, "request_id", "")
    if request_id:
        names.append(("request", request_id))
    ask_id = getattr(message, "ask_id", "")
    if ask_id:
        names.append(("ask", ask_id))
    if isinstance(message, ReuseAnswered) and message.grant is not None:
        names.append(("transfer", message.grant.transfer_id))
    return list(dict.fromkeys(names))
