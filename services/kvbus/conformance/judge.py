"""What was heard, against what must hold. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from kvbus.conformance.questions import Question
from kvbus.router.offered import Offered
from kvbus_schemas import RouteAnswered, RouteAsked

TRACES_MAX = 3
"""Examples of the same fault that are shown."""


class Heard(msgspec.Struct, frozen=True):
    """An answer, and how long after its question it came."""

    answer: RouteAnswered
    took_ms: float


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One check. `found` says what is wrong, `advice` what to do; both are empty where it passed."""

    check: str
    about: str
    passed: bool
    found: str = ""
    advice: str = ""


def judge(guest: str, questions: Sequence[Question], heard: Iterable[Heard], unreadable: Sequence[str]) -> list[Row]:
    """One row for each question (all of a burst in one), then what holds for all answers."""
    answers: dict[str, list[Heard]] = defaultdict(list)
    for one in heard:
        answers[one.answer.ask_id].append(one)
    rows: dict[str, Row] = {}
    for question in questions:
        row = _row(question, answers.get(question.asked.ask_id, []))
        if question.name not in rows or rows[question.name].passed:
            rows[question.name] = row
    flat = [one.answer for found in answers.values() for one in found]
    return [*rows.values(), _once(questions, answers), _readable(unreadable), *_envelope(guest, flat)]


def offered_by(asked: RouteAsked) -> Offered:
    """What a question offers."""
    return Offered(
        prefills=tuple(view.engine_id for view in asked.engines if view.role == "prefill"),
        decodes=tuple(view.engine_id for view in asked.engines if view.role == "decode"),
        asked=asked.asked,
        second=asked.part == "decode",
    )


def _row(question: Question, found: Sequence[Heard]) -> Row:
    why = _fault(question, found)
    if not why:
        return Row(check=question.name, about=question.about, passed=True)
    return Row(check=question.name, about=question.about, passed=False, found=why, advice=question.advice)


def _fault(question: Question, found: Sequence[Heard]) -> str:
    if not question.answers:
        return "answered" if found else ""
    if not found:
        return "no answer"
    deadline_ms = question.asked.deadline_ms
    if found[0].took_ms > deadline_ms:
        return f"answered after {found[0].took_ms:.0f} ms, the deadline was {deadline_ms:g} ms"
    return _wrong(question.asked, found[0].answer)


def _wrong(asked: RouteAsked, answer: RouteAnswered) -> str:
    """Stricter than a router, which takes local for pull, and any mode where only a decode is left to choose."""
    fault = offered_by(asked).fault(answer.mode, answer.prefill_id, answer.decode_id)
    if fault is not None:
        return fault.why
    strict = asked.asked == "pull" or asked.part == "decode"
    return f"mode {answer.mode} where {asked.asked} is asked for" if strict and answer.mode != asked.asked else ""


def _once(questions: Sequence[Question], answers: dict[str, list[Heard]]) -> Row:
    many = [q.name for q in questions if len(answers.get(q.asked.ask_id, [])) > 1]
    return Row(
        check="once",
        about="each question is answered once",
        passed=not many,
        found=f"answered more than once: {', '.join(many[:TRACES_MAX])}" if many else "",
        advice="two subscriptions that overlap? two processes of one name? give each its own" if many else "",
    )


def _readable(unreadable: Sequence[str]) -> Row:
    return Row(
        check="readable",
        about="what it says is a RouteAnswered, in its place",
        passed=not unreadable,
        found="; ".join(unreadable[:TRACES_MAX]),
        advice="a MessagePack map with type RouteAnswered, on route_answered.<you>.<asker>.<ask_id>; at most 256 KiB"
        if unreadable
        else "",
    )


def _envelope(guest: str, answers: Sequence[RouteAnswered]) -> list[Row]:
    sources = sorted({answer.source for answer in answers} - {guest})
    nameless = sum(not answer.incarnation for answer in answers)
    undated = sum(answer.sent_unix_us <= 0 for answer in answers)
    return [
        _checked(
            "source", "`source` is its name", f"source {sources[0]!r}" if sources else "", "the name it is asked by"
        ),
        _checked(
            "incarnation",
            "`incarnation` is there",
            f"empty in {nameless} answers" if nameless else "",
            "some random hexadecimal digits, new at every start of the process",
        ),
        _checked(
            "seq", "`seq` rises", _gaps(answers),
            "count what this process says, from 1; also what goes to other routers",
        ),
        _checked(
            "sent_unix_us", "`sent_unix_us` is there", f"missing in {undated} answers" if undated else "",
            "microseconds since 1970 by its own clock",
        ),
    ]  # fmt: skip


def _gaps(answers: Sequence[RouteAnswered]) -> str:
    """What is wrong with the numbers. Other routers may be asking too: a number may be skipped, never repeated."""
    last: dict[str, int] = {}
    for answer in answers:
        before = last.get(answer.incarnation, 0)
        if answer.seq <= before:
            return f"{answer.seq} after {before}"
        last[answer.incarnation] = answer.seq
    return ""


def _checked(check: str, about: str, found: str, advice: str) -> Row:
    return Row(check=check, about=about, passed=not found, found=found, advice=advice if found else "")
