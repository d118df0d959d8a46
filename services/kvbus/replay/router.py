"""A recording against a routing policy: every question asked again. Pure but for the policy.

Each recorded router had a policy object of its own, so each gets one here; with a canary it had two. What a guest on
the bus has decided is left out of a replay of the recorded policies: it is not here to be asked. Where the recorded
engine scores as high as the one chosen now, the two answers differ by the order of the engines or by the policy's turn,
which older recordings do not tell: a tie, not a difference. Policies that count turns are met exactly if the recording
begins with the router.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbus.replay.compare import Decision, Difference
from kvbus.replay.recording import Recording
from kvbus.replay.views import Asked, questions_of
from kvbus.router.policies import Policy, RouteChoice, RouteQuestion
from kvbus_schemas import RouteDecided

SCORE_TOLERANCE = 0.01
"""Scores hang on the share of used blocks, which a load report on its way may have changed."""


@dataclass(slots=True)
class Answer:
    """What the policy says now; `choice` is None where it failed, `failure` says why."""

    asked: Asked
    choice: RouteChoice | None
    failure: str = ""

    def fields(self) -> dict[str, tuple[Any, Any]]:
        """What differs from the recorded choice: (recorded, now)."""
        decided, choice = self.asked.decided, self.choice
        if choice is None:
            return {"failure": ("", self.failure)}
        pairs = {
            "mode": (decided.mode, choice.mode),
            "prefill_id": (self._prefill_then(choice), choice.prefill_id),
            "decode_id": (decided.decode_id, choice.decode_id),
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def is_tie(self) -> bool:
        """Whether only engines differ, and those recorded score as high."""
        fields, choice = self.fields(), self.choice
        if choice is None or "mode" in fields:
            return False
        scores = {candidate.engine_id: candidate.score for candidate in choice.candidates}
        return all(
            then in scores and now in scores and scores[now] - scores[then] <= SCORE_TOLERANCE
            for then, now in fields.values()
        )

    def _prefill_then(self, choice: RouteChoice) -> str:
        """The second answer of mode deferred names no prefill again."""
        is_second = self.asked.question.part == "decode" and not choice.prefill_id
        return "" if is_second else self.asked.decided.prefill_id


@dataclass(slots=True)
class PolicyReport:
    """How often a policy chooses what was recorded."""

    answers: list[Answer]
    differences: list[Difference]
    ties: int
    by_guests: int = 0
    """Decisions of guests, which were not asked again."""


def ask(recording: Recording, policy_of: Callable[[RouteDecided], Policy | None]) -> PolicyReport:
    """Ask every recorded question again. `policy_of` makes the policy of a router, seeing the first decision of each
    of its policies; None for what was a guest's."""
    policies: dict[tuple[str, str], Policy | None] = {}
    answers: list[Answer] = []
    by_guests = 0
    for asked in questions_of(recording):
        place = (asked.event.sender, asked.decided.policy)
        if place not in policies:
            policies[place] = policy_of(asked.decided)
        policy = policies[place]
        if policy is None:
            by_guests += 1
        else:
            answers.append(answer_of(policy, asked, asked.question))
    report = compared(answers)
    report.by_guests = by_guests
    return report


def answer_of(policy: Policy, asked: Asked, question: RouteQuestion) -> Answer:
    """The policy's answer; it is somebody else's code, and may fail."""
    try:
        choice = policy.choose(question)
    except Exception as error:
        return Answer(asked, None, f"raised {error!r}")
    offered = {view.engine_id for view in (*question.prefills, *question.decodes)} | {""}
    stranger = next((name for name in (choice.prefill_id, choice.decode_id) if name not in offered), None)
    if stranger is not None:
        return Answer(asked, None, f"chose {stranger!r}, which was not offered")
    return Answer(asked, choice)


def compared(answers: list[Answer]) -> PolicyReport:
    """The answers beside what was recorded."""
    found: list[Difference] = []
    ties = 0
    for answer in answers:
        fields = answer.fields()
        if not fields:
            continue
        if answer.is_tie():
            ties += 1
            continue
        event = answer.asked.event
        found.append(Difference("changed", Decision(event.key, event.to, event.at_s, answer.asked.decided), fields))
    return PolicyReport(answers, found, ties)
