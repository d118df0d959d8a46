"""What `kvbus trace export --format jsonl` has written, read again. Pure: lines of text in, events out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from kvbus.errors import ConfigError
from kvbus.trace.core import Line
from kvbus.trace.presence import Record
from kvbus_schemas import AnyMessage, EngineCard

_decoder = msgspec.json.Decoder(Record)
_SUBJECT_TOKENS = 7


class Gone(NamedTuple):
    """An engine's card is there no more."""

    engine_id: str


class Event(NamedTuple):
    """A line of a recording. `number` counts the lines; `at_s` never goes back."""

    number: int
    at_s: float
    sender: str
    to: str
    message: AnyMessage | Gone
    subject: str

    @property
    def key(self) -> str:
        """The transfer, conversation or engine that it is about."""
        return self.message.engine_id if isinstance(self.message, Gone) else self.message.key

    @property
    def is_presence(self) -> bool:
        """Whether it says that an engine is there, or not."""
        return isinstance(self.message, Gone | EngineCard)


@dataclass(frozen=True)
class Recording:
    """The lines of a trace in their order."""

    events: tuple[Event, ...]

    def said(self) -> Iterator[tuple[Event, AnyMessage]]:
        """The lines that are messages of processes."""
        for event in self.events:
            if not isinstance(event.message, Gone | EngineCard):
                yield event, event.message

    @property
    def began_s(self) -> float:
        """Time of the first line, in seconds since 1970."""
        return self.events[0].at_s

    @cached_property
    def engines(self) -> set[str]:
        """All engines of which there is a card."""
        return {event.key for event in self.events if event.is_presence}

    def story(self, key: str) -> list[Line]:
        """All that was said about a key."""
        return [
            Line(event.number, event.at_s, event.sender, event.to, message)
            for event, message in self.said()
            if event.key == key
        ]


def read(lines: Iterable[str]) -> Recording:
    """The recording in these lines. Raises ConfigError, with the number of the line that is none of a trace."""
    events: list[Event] = []
    at_s = 0.0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = _decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} is not of a trace: {error}; write one with kvbus trace export") from error
        tokens = record.subject.split(".")
        if len(tokens) != _SUBJECT_TOKENS:
            raise ConfigError(f"line {number} has no subject of the bus: {record.subject[:80]!r}")
        at_s = max(at_s, record.unix_s)
        message = Gone(tokens[-1]) if record.message is None else record.message
        events.append(Event(number, at_s, tokens[4], tokens[5], message, record.subject))
    if not events:
        raise ConfigError("the recording is empty: write one with kvbus trace export --format jsonl")
    return Recording(tuple(events))


def later(recording: Recording, event: Event, than: Event) -> Recording:
    """The recording as it would be if `event` had come right after `than`."""
    rest = [one for one in recording.events if one.number != event.number]
    at = next(place for place, one in enumerate(rest) if one.number == than.number) + 1
    return Recording((*rest[:at], event._replace(at_s=than.at_s), *rest[at:]))


def earlier(recording: Recording, event: Event, than: Event) -> Recording:
    """The recording as it would be if `event` had come right before `than`."""
    rest = [one for one in recording.events if one.number != event.number]
    at = next(place for place, one in enumerate(rest) if one.number == than.number)
    return Recording((*rest[:at], event._replace(at_s=than.at_s), *rest[at:]))
