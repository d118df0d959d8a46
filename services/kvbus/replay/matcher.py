"""A recording against a fresh matcher core, with recorded times as its clock. Pure.

What the recorded matcher heard is told to the core as `MatcherService` would tell it; what it published is what the
core's posts are compared with.
"""

from collections.abc import Callable

from kvbus.matcher.core import MatcherCore
from kvbus.matcher.service import MATCHER, OWN_MATCHER, TICK_S
from kvbus.presence import Cards
from kvbus.replay.compare import Decision, Outcome, gaps_of
from kvbus.replay.recording import Event, Gone, Recording
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    Post,
    PushOrdered,
    TransferClosed,
)

Pace = Callable[[float], None]
DECISIONS = (PushOrdered, BlocksUnavailable, CancelOrdered)


def at_once(_at_s: float) -> None:
    """Do not wait for the recorded time."""


class _Fed:
    """A core, the cards that it has seen, and its posts so far."""

    def __init__(self, core: MatcherCore, now_s: float) -> None:
        self.core = core
        self.posts: list[tuple[float, Post]] = []
        self._cards = Cards()
        self._now_s = now_s

    def advance(self, until_s: float) -> None:
        """Tick as the service does."""
        while self._now_s + TICK_S <= until_s:
            self._now_s += TICK_S
            for engine_id, incarnation in self._cards.gone(self._now_s):
                self._give(self._now_s, self.core.engine_gone(engine_id, incarnation, self._now_s))
            self._give(self._now_s, self.core.tick(self._now_s))

    def take(self, event: Event) -> None:
        """Hear one line."""
        self.advance(event.at_s)
        message = event.message
        if isinstance(message, Gone):
            self._cards.vanished(message.engine_id, event.at_s)
        elif isinstance(message, EngineCard):
            self._cards.seen(message)
            self._give(event.at_s, self.core.engine_seen(message, event.at_s))
        else:
            self._give(event.at_s, self.core.receive(message, event.at_s))

    def _give(self, at_s: float, posts: list[Post]) -> None:
        self.posts += [(at_s, post) for post in posts]


def replay(recording: Recording, core: MatcherCore | None = None, pace: Pace = at_once) -> Outcome:
    """Feed the recording to `core`, a fresh one by default. `pace` is called with the time of each line before it."""
    core = core or MatcherCore()
    fed = _Fed(core, recording.began_s)
    heard = inputs_of(recording)
    for event in heard:
        pace(event.at_s)
        fed.take(event)
    fed.advance(recording.events[-1].at_s)
    replayed = [Decision(post.message.key, post.to, at_s, post.message) for at_s, post in fed.posts]
    return outcome_of(recording, replayed)


def outcome_of(recording: Recording, replayed: list[Decision]) -> Outcome:
    """Replayed decisions beside the recorded ones."""
    heard = inputs_of(recording)
    begun = {event.key for event in heard if not event.is_presence}
    registered = {event.key for event in heard if isinstance(event.message, BlocksRegistered)}
    recorded, before = [], 0
    for event in _words(recording):
        message = event.message
        known = registered if isinstance(message, PushOrdered) else begun
        if isinstance(message, DECISIONS) and event.key in known:
            recorded.append(Decision(event.key, event.to, event.at_s, message))
        else:
            before += 1
    gaps = gaps_of((event.at_s, event.sender) for event in _words(recording))
    return Outcome(recorded, replayed, inputs=heard, gaps=gaps, before=before)


def inputs_of(recording: Recording) -> list[Event]:
    """What a matcher hears: as `HEARD` and `MatcherService` have it."""
    own = {
        event.key
        for event in recording.events
        if isinstance(event.message, EngineCard) and OWN_MATCHER in event.message.capabilities
    }
    return [event for event in recording.events if _is_heard(recording, event, own)]


def _is_heard(recording: Recording, event: Event, own_matchers: set[str]) -> bool:
    match event.message:
        case EngineCard() | Gone():
            return True
        case BlocksRegistered() | BlocksReady():
            return event.to == MATCHER and event.message.producer_id not in own_matchers
        case BlocksUnavailable():
            return event.sender == event.message.producer_id and event.sender not in own_matchers
        case TransferClosed():
            return event.message.producer_id not in own_matchers
        case CancelOrdered():
            return not is_matcher(recording, event.sender)
        case _:
            return False


def is_matcher(recording: Recording, sender: str) -> bool:
    """Matchers are processes named after what they are; an engine may be called anything."""
    return sender.split("-", maxsplit=1)[0] == MATCHER and sender not in recording.engines


def _words(recording: Recording) -> list[Event]:
    return [event for event, _ in recording.said() if is_matcher(recording, event.sender)]
