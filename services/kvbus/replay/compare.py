"""Recorded decisions beside replayed ones. Pure.

Decisions are compared by meaning: envelopes, fresh random ids and repeats of the same word count for nothing, a lease
or a time differs only if it is off by more than TOLERANCE_S. A process that was not there decided nothing: what a fresh
core decides in such a gap, and nobody said, is counted as `unheard`. Messages of different senders within CROSSED_S may
have reached the recorded process the other way round than the stream; a difference that goes away when they are turned
round is counted as `crossed`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from kvbus.replay.recording import Event, Recording, earlier, later
from kvbus_schemas import Message, PushOrdered, ReuseAnswered

TOLERANCE_S = 3.0
"""Cards are renewed every 2 s, so that the end of an engine is known no better."""
CROSSED_S = 0.05
CROSSED_REACH = 3
"""Messages about the same key that one may have overtaken."""
CROSSED_MAX = 8
"""Pairs of messages of one key that are turned round at most."""
CROSSED_KEYS_MAX = 20
"""Transfers that are looked at so; where more differ, it is not for that."""
ENVELOPE = frozenset(("type", "source", "incarnation", "seq", "sent_unix_us", "trace_id", "span_id"))

Kind = Literal["missing", "extra", "changed"]


class Decision(NamedTuple):
    """A message that a process published, and when. `slot` tells answers apart that would be repeats otherwise."""

    key: str
    to: str
    at_s: float
    message: Message
    slot: str = ""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Two decisions of one place answer the same question."""
        return (self.key, self.to, type(self.message).__name__, self.slot)

    def meaning(self) -> dict[str, Any]:
        """The fields that count, but for times."""
        fields: dict[str, Any] = msgspec.to_builtins(self.message)
        left = {name: value for name, value in fields.items() if name not in ENVELOPE}
        if isinstance(self.message, ReuseAnswered) and self.message.grant is not None:
            left["grant"] = {**left["grant"], "transfer_id": "fresh" if self.message.grant.transfer_id else ""}
        for name in ("lease_s", "age_s"):
            left.pop(name, None)
        return left

    def times(self) -> dict[str, float]:
        """What must be equal to about TOLERANCE_S."""
        message = self.message
        if isinstance(message, PushOrdered):
            return {"at_s": self.at_s, "lease_end_s": self.at_s + message.lease_s}
        if isinstance(message, ReuseAnswered):
            return {"at_s": self.at_s, "age_s": message.age_s}
        return {"at_s": self.at_s}


class Difference(NamedTuple):
    """`fields` maps a name to what was recorded and what was replayed."""

    kind: Kind
    decision: Decision
    fields: dict[str, tuple[Any, Any]] = {}


@dataclass(slots=True)
class Outcome:
    """A replay: what was decided then, and now. `gaps` are the times in which the recorded process was not there."""

    recorded: list[Decision]
    replayed: list[Decision]
    inputs: list[Event] = field(default_factory=list)
    """What the process heard."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    before: int = 0
    """Recorded decisions about what began before the recording."""


@dataclass(slots=True)
class Report:
    """How a replay went."""

    differences: list[Difference]
    inputs: int
    decisions: int
    unheard: int = 0
    crossed: int = 0
    before: int = 0


def report_of(recording: Recording, outcome: Outcome, again: Callable[[Recording], Outcome]) -> Report:
    """The differences of a replay; `again` replays the recording in another order."""
    found, unheard = differences(outcome)
    keys = dict.fromkeys(difference.decision.key for difference in found)
    crossed = {
        key
        for key in list(keys)[:CROSSED_KEYS_MAX]
        if any(_agrees_on(key, again(other)) for other in _orders(recording, outcome.inputs, key))
    }
    left = [difference for difference in found if difference.decision.key not in crossed]
    return Report(
        sorted(left, key=lambda difference: difference.decision.at_s),
        inputs=len(outcome.inputs),
        decisions=len(_distinct(outcome.recorded)),
        unheard=unheard,
        crossed=len(crossed),
        before=outcome.before,
    )


def _agrees_on(key: str, outcome: Outcome) -> bool:
    return all(difference.decision.key != key for difference in differences(outcome)[0])


def differences(outcome: Outcome) -> tuple[list[Difference], int]:
    """What differs, and how many decisions fell into a gap."""
    recorded, replayed = _distinct(outcome.recorded), _distinct(outcome.replayed)
    found: list[Difference] = []
    alone: dict[tuple[str, str, str, str], list[Decision]] = {}
    for decision in replayed:
        alone.setdefault(decision.place, []).append(decision)
    lost: list[Decision] = []
    for decision in recorded:
        same = next((o for o in alone.get(decision.place, ()) if o.meaning() == decision.meaning()), None)
        if same is None:
            lost.append(decision)
            continue
        alone[decision.place].remove(same)
        if off := _off(decision, same, outcome.gaps):
            found.append(Difference("changed", decision, off))
    for decision in lost:
        others = alone.get(decision.place)
        if others:
            found.append(Difference("changed", decision, _fields(decision, others.pop(0))))
        else:
            found.append(Difference("missing", decision))
    extra = [decision for decisions in alone.values() for decision in decisions]
    heard = [decision for decision in extra if not in_gap(decision.at_s, outcome.gaps)]
    return found + [Difference("extra", decision) for decision in heard], len(extra) - len(heard)


def _distinct(decisions: Iterable[Decision]) -> list[Decision]:
    """The decisions without repeats of the same word; the first one of each stays."""
    kept: dict[tuple[Any, ...], Decision] = {}
    for decision in decisions:
        kept.setdefault((*decision.place, msgspec.json.encode(decision.meaning())), decision)
    return list(kept.values())


def _off(recorded: Decision, replayed: Decision, gaps: Sequence[tuple[float, float]]) -> dict[str, tuple[Any, Any]]:
    """The times that differ too much; in a gap a decision waits for its end."""
    now = replayed.times()
    off = {name: (then, now[name]) for name, then in recorded.times().items() if abs(then - now[name]) > TOLERANCE_S}
    if in_gap(replayed.at_s, gaps):
        off.pop("at_s", None)
    return off


def in_gap(at_s: float, gaps: Sequence[tuple[float, float]]) -> bool:
    """Whether nobody was there at that time."""
    return any(start_s <= at_s < end_s for start_s, end_s in gaps)


def _fields(recorded: Decision, replayed: Decision) -> dict[str, tuple[Any, Any]]:
    then, now = recorded.meaning(), replayed.meaning()
    names = [*then, *(name for name in now if name not in then)]
    return {name: (then.get(name), now.get(name)) for name in names if then.get(name) != now.get(name)}


def _orders(recording: Recording, heard: Sequence[Event], key: str) -> list[Recording]:
    """The recording in each order that it may have been heard in, if one message about a key has crossed others."""
    said = [event for event in heard if event.key == key and not event.is_presence]
    pairs = [
        (one, two)
        for at, one in enumerate(said)
        for two in said[at + 1 : at + 1 + CROSSED_REACH]
        if one.sender != two.sender and two.at_s - one.at_s <= CROSSED_S
    ][:CROSSED_MAX]
    return [order for one, two in pairs for order in (later(recording, one, two), earlier(recording, two, one))]


def gaps_of(words: Iterable[tuple[float, str]]) -> list[tuple[float, float]]:
    """When none of several processes was there, judged by their (time, sender): from the last word of one to the
    first of the next. Before the first and after the last word of all there is no gap."""
    spans: dict[str, tuple[float, float]] = {}
    for at_s, sender in words:
        start_s, _ = spans.get(sender, (at_s, at_s))
        spans[sender] = (start_s, at_s)
    found: list[tuple[float, float]] = []
    covered_s = float("inf")
    for start_s, end_s in sorted(spans.values()):
        if start_s > covered_s:
            found.append((covered_s, start_s))
        covered_s = end_s if covered_s == float("inf") else max(covered_s, end_s)
    return found
