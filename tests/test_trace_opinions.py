"""kvbus trace why shows what guests and shadows have said, beside the choice."""

from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.test_trace_core import T, decided, line

from kvbus.trace.core import Line, Story, stories_of
from kvbus.trace.opinions import opinions_of
from kvbus.trace.render import show_why
from kvbus_schemas import EngineView, RouteAnswered, RouteAsked, RouteDecided

ENGINES = [EngineView(engine_id="p0", role="prefill"), EngineView(engine_id="d0", role="decode")]


def asked(ask_id: str = "q", **given: Any) -> RouteAsked:
    facts: dict[str, Any] = {"request_id": "req-1", "transfer_id": T, "model": "m", "prompt_bytes": 1}
    return RouteAsked(ask_id=ask_id, engines=ENGINES, deadline_ms=20.0, **(facts | given))


def answered(ask_id: str = "q", **given: Any) -> RouteAnswered:
    return RouteAnswered(**({"ask_id": ask_id, "prefill_id": "p0", "decode_id": "d0"} | given))


def opinions(lines: list[Line]) -> list[tuple[str, str, str, float, str]]:
    (story,) = stories_of(lines)
    (decision,) = (one for one in story.lines if isinstance(one.message, RouteDecided))
    found = opinions_of(story, decision)
    return [(one.router, one.part, one.said, round(one.after_ms, 3), one.verdict) for one in found]


SHADOWS = [
    line(2, "r", "same", asked("s", shadow=True)),
    line(2.1, "r", "other", asked("s", shadow=True)),
    line(2.2, "r", "mute", asked("s", shadow=True)),
    line(4, "same", "r", answered("s")),
    line(5, "other", "r", answered("s", mode="local", prefill_id="", reason="no need")),
]


def test_the_guest_comes_first_and_shadows_agree_differ_or_say_nothing() -> None:
    lines = [
        line(0, "r", "g", asked()),
        line(1, "g", "r", answered()),
        line(1.5, "r", "all", replace(decided(), policy="guest g")),
    ]
    assert opinions([*lines, *SHADOWS]) == [
        ("g", "guest", "early p0 -> d0", 1.0, "used"),
        ("same", "shadow", "early p0 -> d0", 2.0, "agrees"),
        ("other", "shadow", "local d0", 2.9, "differs"),
        ("mute", "shadow", "-", 0.0, "no answer"),
    ]


@pytest.mark.parametrize(("at_ms", "verdict"), [(5.0, "not used"), (25.0, "late")])
def test_a_guest_that_was_not_followed_is_shown_with_what_it_said(at_ms: float, verdict: str) -> None:
    lines = [line(0, "r", "g", asked()), line(at_ms, "g", "r", answered()), line(30, "r", "all", decided())]
    assert opinions(lines) == [("g", "guest", "early p0 -> d0", at_ms, verdict)]


def test_whoever_answers_what_was_asked_of_all_is_shown() -> None:
    lines = [line(0, "r", "all", decided()), line(1, "r", "all", asked(shadow=True))]
    assert opinions(lines) == []
    lines += [line(2, "x", "r", answered()), line(3, "y", "r", answered(decode_id="d9"))]
    assert [(one[0], one[4]) for one in opinions(lines)] == [("x", "agrees"), ("y", "differs")]


def test_an_answer_of_somebody_who_was_not_asked_is_no_opinion() -> None:
    lines = [line(0, "r", "g", asked()), line(1, "thief", "r", answered()), line(2, "r", "all", decided())]
    assert opinions(lines) == [("g", "guest", "-", 0.0, "no answer")]


def test_each_decision_of_mode_deferred_has_its_own_answers() -> None:
    first, second = decided(mode="deferred", decode_id=""), decided(mode="deferred")
    lines = [
        line(0, "r", "all", first),
        line(1, "r", "s", asked("a", shadow=True)),
        line(2, "s", "r", answered("a", mode="deferred", decode_id="")),
        line(3, "r", "all", second),
        line(4, "r", "s", asked("b", shadow=True, part="decode")),
        line(5, "s", "r", answered("b", mode="deferred", prefill_id="")),
    ]
    (story,) = stories_of(lines)
    decisions = [one for one in story.lines if isinstance(one.message, RouteDecided)]
    assert [[one.verdict for one in opinions_of(story, decision)] for decision in decisions] == [["agrees"], ["agrees"]]


def test_a_question_belongs_to_its_own_dispatch_of_a_request_and_to_none_before_that() -> None:
    retry = "b" * 32
    lines = [
        line(0, "r", "all", decided()),
        line(1, "r", "g", asked("a", transfer_id=retry)),
        line(2, "r", "all", decided(retry)),
        line(3, "c", "g", asked("x", request_id="nobody", transfer_id="d" * 32)),
    ]
    assert [(story.transfer_id, len(story.lines)) for story in stories_of(lines)] == [(T, 1), (retry, 2)]


def test_somebody_elses_words_do_no_harm_on_a_terminal() -> None:
    rude = answered("s", reason="[/red]\x1b[2J")
    story: Story
    (story,) = stories_of(
        [line(0, "r", "all", replace(decided(), reason="[/b]\x1b")), *SHADOWS, line(9, "mute", "r", rude)]
    )
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=200, color_system=None)
        with console.capture() as captured:
            show_why(console, story)
        assert "\x1b" not in captured.get()
        assert "[/red] [2J" in captured.get()
