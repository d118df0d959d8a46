"""A recording against fresh reuse cores and an empty bucket, with recorded times as their clock. Pure.

An answer names no question, so each is taken to answer the oldest open question of that asker about that conversation.
A question that nobody answered, in a gap between two processes, was claimed by nobody.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvbus.conversations_client import REUSE
from kvbus.replay.compare import Decision, Outcome, gaps_of, in_gap
from kvbus.replay.matcher import Pace, at_once
from kvbus.replay.recording import Event, Gone, Recording
from kvbus.reuse.core import WHY_WITHDRAWN, Found, Rules, Verdict, flaw_of, is_key, judge_ask, judge_offer
from kvbus.reuse.core import judge_withdrawal as judge_withdrawn
from kvbus.reuse.engines import Engines, Standing
from kvbus.reuse.memory import Memory
from kvbus.reuse.record import Record
from kvbus_schemas import EngineCard, Message, ReuseAnswered, ReuseAsked, ReuseOffered, ReuseReleased, ReuseWithdrawn

DECISIONS = (ReuseAnswered, ReuseReleased)
ANSWER_MAX_S = 5.0
"""An answer comes within this time, or none does."""
MEMORY_MAX = 50_000
FRESH_ID = "0" * 32


@dataclass(slots=True)
class _Key:
    """A key of the bucket: its record, when it was written, and for how many whole seconds."""

    record: Record
    revision: int
    ends_s: float


class _Process:
    """The reuse process's part: asks the core, writes, says."""

    def __init__(self, rules: Rules, now_s: float) -> None:
        self.decisions: list[Decision] = []
        self._rules = rules
        self._engines = Engines(now_s)
        self._memory = Memory(MEMORY_MAX)
        self._bucket: dict[str, _Key] = {}
        self._revision = 0

    def take(self, event: Event) -> None:
        """Hear one line."""
        match event.message:
            case EngineCard():
                self._engines.seen(event.message)
            case Gone():
                self._engines.vanished(event.message.engine_id, event.at_s)
            case ReuseOffered():
                self._offered(event.message, event.at_s)
            case ReuseWithdrawn():
                self._withdrawn(event.message, event.at_s)
            case ReuseAsked():
                self._asked(event.message, event)
            case _:
                pass

    def _offered(self, offer: ReuseOffered, now_s: float) -> None:
        if flaw_of(offer):
            return
        found = self._find(offer.conversation, now_s)
        standing = self._engines.standing(offer.engine_id, offer.incarnation, now_s)
        old_is_live = self._holder(found, now_s) == "live"
        verdict = judge_offer(offer, found, self._rules, standing=standing, old_is_live=old_is_live)
        if verdict.write is not None:
            self._memory.note(offer.conversation, verdict.write.over or "expired")
        self._carry_out(offer.conversation, verdict, now_s)

    def _withdrawn(self, message: ReuseWithdrawn, now_s: float) -> None:
        if flaw_of(message):
            return
        verdict = judge_withdrawn(message, self._find(message.conversation, now_s))
        self._memory.note(message.conversation, WHY_WITHDRAWN[message.reason])
        self._carry_out(message.conversation, verdict, now_s)

    def _asked(self, asked: ReuseAsked, event: Event) -> None:
        key = asked.conversation
        if not is_key(key):
            return
        found = self._find(key, event.at_s)
        verdict = judge_ask(
            asked,
            found,
            self._rules,
            standing=self._holder(found, event.at_s),
            transfer_id=FRESH_ID,
            if_missing=self._memory.why_missing(key),
        )
        self._carry_out(key, verdict, event.at_s)
        if verdict.event == "engine_gone":
            self._memory.note(key, "engine_gone")
        if verdict.answer is not None:
            self.decisions.append(Decision(key, event.sender, event.at_s, verdict.answer, _slot(event.number)))

    def _find(self, key: str, now_s: float) -> Found | None:
        kept = self._bucket.get(key)
        if kept is None or kept.ends_s <= now_s:
            return None
        return Found(kept.record, kept.revision, kept.ends_s - now_s)

    def _holder(self, found: Found | None, now_s: float) -> Standing:
        record = found.record if found else None
        if record is None:
            return "unknown"
        return self._engines.standing(record.engine_id, record.incarnation, now_s)

    def _carry_out(self, key: str, verdict: Verdict, now_s: float) -> None:
        record = verdict.write
        if record is not None:
            self._revision += 1
            self._bucket[key] = _Key(record, self._revision, now_s + max(1, math.ceil(record.lifetime_s)))
        elif verdict.delete:
            self._bucket.pop(key, None)
        for post in verdict.posts:
            self.decisions.append(_said(post.message, post.to, now_s))


def replay(recording: Recording, rules: Rules | None = None, pace: Pace = at_once) -> Outcome:
    """Feed the recording to fresh cores. `pace` is called with the time of each line before it."""
    process = _Process(rules or Rules(), recording.began_s)
    for event in inputs_of(recording):
        pace(event.at_s)
        process.take(event)
    return outcome_of(recording, process.decisions)


def inputs_of(recording: Recording) -> list[Event]:
    """What a reuse process hears, but for questions that were asked while none was there."""
    gaps = _gaps(recording)
    _, unanswered = _answers_of(recording, gaps)
    return [
        event
        for event in recording.events
        if is_heard(event) and not (event.number in unanswered and in_gap(event.at_s, gaps))
    ]


def outcome_of(recording: Recording, replayed: list[Decision]) -> Outcome:
    """Replayed decisions beside the recorded ones."""
    words, gaps = _words(recording), _gaps(recording)
    questions, _ = _answers_of(recording, gaps)
    recorded = [
        Decision(event.key, event.to, event.at_s, event.message, _slot(questions[event.number]))
        for event in words
        if isinstance(event.message, ReuseAnswered) and event.number in questions
    ]
    recorded += [
        _said(event.message, event.to, event.at_s) for event in words if isinstance(event.message, ReuseReleased)
    ]
    if len({event.sender for event in words}) > 1:
        replayed = _forgiving(recorded, replayed)
    return Outcome(recorded, replayed, inputs=inputs_of(recording), gaps=gaps)


def _words(recording: Recording) -> list[Event]:
    return [event for event, _ in recording.said() if is_reuse(recording, event.sender)]


def _gaps(recording: Recording) -> list[tuple[float, float]]:
    return gaps_of((event.at_s, event.sender) for event in _words(recording))


def is_heard(event: Event) -> bool:
    """Whether reuse processes hear this line."""
    if event.is_presence or isinstance(event.message, ReuseWithdrawn):
        return True
    return event.to == REUSE and isinstance(event.message, ReuseOffered | ReuseAsked)


def is_reuse(recording: Recording, sender: str) -> bool:
    """Reuse processes are named after what they are; an engine may be called anything."""
    return sender.split("-", maxsplit=1)[0] == REUSE and sender not in recording.engines


def _said(message: Message, to: str, at_s: float) -> Decision:
    return Decision(message.key, to, at_s, message, slot_of(message, 0))


def slot_of(message: Message, asked_on: int) -> str:
    """What tells a decision from another of the same kind; an answer is that to the question on line `asked_on`."""
    if isinstance(message, ReuseReleased):
        return f"{message.offer_id} {message.reason}"
    return _slot(asked_on) if isinstance(message, ReuseAnswered) else ""


def _slot(asked_on: int) -> str:
    return f"asked on line {asked_on}"


def _answers_of(recording: Recording, gaps: Sequence[tuple[float, float]]) -> tuple[dict[int, int], set[int]]:
    """The line of each answer with that of its question, and the lines of the questions without an answer. Of several
    that wait, one that was asked while nobody was there has got none."""
    asked: dict[tuple[str, str], deque[Event]] = defaultdict(deque)
    questions: dict[int, int] = {}
    lost: set[int] = set()
    for event in recording.events:
        if isinstance(event.message, ReuseAsked) and event.to == REUSE:
            asked[event.sender, event.key].append(event)
        elif isinstance(event.message, ReuseAnswered) and is_reuse(recording, event.sender):
            waiting = asked[event.to, event.key]
            while waiting and (
                waiting[0].at_s < event.at_s - ANSWER_MAX_S or (len(waiting) > 1 and in_gap(waiting[0].at_s, gaps))
            ):
                lost.add(waiting.popleft().number)
            if waiting:
                questions[event.number] = waiting.popleft().number
    return questions, lost | {event.number for waiting in asked.values() for event in waiting}


def _forgiving(recorded: list[Decision], replayed: list[Decision]) -> list[Decision]:
    """Why a key is missing is what one process remembers, at best. Where several have answered, or one after another,
    a recorded `new` stands for any such reason."""
    new = {one.place for one in recorded if isinstance(one.message, ReuseAnswered) and one.message.miss == "new"}

    def forgiven(one: Decision) -> Decision:
        message = one.message
        if one.place in new and isinstance(message, ReuseAnswered) and message.miss is not None:
            return one._replace(message=msgspec.structs.replace(message, miss="new"))
        return one

    return [forgiven(one) for one in replayed]
