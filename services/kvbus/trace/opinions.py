"""What routers on the bus have said to a decision: the guest that was to decide, and shadows. Pure."""

from typing import Literal, NamedTuple

from kvbus.trace.core import Line, Story
from kvbus.trace.phrases import route_of
from kvbus_schemas import EVERYONE, RouteAnswered, RouteAsked, RouteDecided

MS = 1000.0


class Opinion(NamedTuple):
    """One router that was asked. `after_ms` is from the question to the answer, on the stream's clock."""

    router: str
    part: Literal["guest", "shadow"]
    answer: RouteAnswered | None
    after_ms: float
    verdict: str

    @property
    def said(self) -> str:
        """The answer, in short."""
        return route_of(self.answer) if self.answer else "-"


def opinions_of(story: Story, decision: Line) -> list[Opinion]:
    """All that was asked for this decision of the story, and answered: the guest first, then by time."""
    decided = decision.message
    assert isinstance(decided, RouteDecided)
    part = "decode" if _is_second(story, decision) else "both"
    found: list[Opinion] = []
    for line in story.lines:
        if isinstance(line.message, RouteAsked) and line.message.part == part:
            found += _opinions(story, line, line.message, decided)
    return sorted(found, key=lambda opinion: opinion.part != "guest")


def _is_second(story: Story, decision: Line) -> bool:
    return any(isinstance(line.message, RouteDecided) and line.seq < decision.seq for line in story.lines)


def _opinions(story: Story, question: Line, asked: RouteAsked, decided: RouteDecided) -> list[Opinion]:
    part: Literal["guest", "shadow"] = "shadow" if asked.shadow else "guest"
    found = [
        Opinion(line.sender, part, line.message, (line.at_s - question.at_s) * MS, "")
        for line in story.lines
        if isinstance(line.message, RouteAnswered)
        and line.message.ask_id == asked.ask_id
        and question.to in (line.sender, EVERYONE)
    ]
    if not found:
        return [] if question.to == EVERYONE else [Opinion(question.to, part, None, 0.0, "no answer")]
    return [opinion._replace(verdict=_verdict(opinion, asked, decided)) for opinion in found]


def _verdict(opinion: Opinion, asked: RouteAsked, decided: RouteDecided) -> str:
    answer = opinion.answer
    assert answer is not None
    if opinion.part == "guest":
        used = decided.policy == f"guest {opinion.router}"
        return "used" if used else "late" if opinion.after_ms > asked.deadline_ms else "not used"
    prefill_id = decided.prefill_id if asked.part == "both" else ""
    same = (answer.mode, answer.prefill_id, answer.decode_id) == (decided.mode, prefill_id, decided.decode_id)
    return "agrees" if same else "differs"
