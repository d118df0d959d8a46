"""What a choice rests on: who chose, and what was known. Pure."""

from collections.abc import Sequence

import msgspec

from kvbus.router.policies import RouteChoice, RouteQuestion
from kvbus_schemas import EngineView, Mode

GUEST = "guest "
"""What a RouteDecided says before the name of a router on the bus that has decided."""
ENGINES_MAX = 16
"""Engines of each role that a RouteDecided shows as the policy saw them."""


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """For whoever wants to understand a choice, or to make it again."""

    policy: str = ""
    asked: Mode | None = None
    engines: list[EngineView] = []
    left_out: int = 0
    canary: bool = False
    prompt_tokens: int = 0
    head: str = ""


def basis_of(question: RouteQuestion, choice: RouteChoice, policy: str, *, canary: bool = False) -> Basis:
    """What `policy` saw when it chose; of more than ENGINES_MAX engines of a role the chosen one and the first."""
    prefills = _shown(question.prefills, choice.prefill_id)
    decodes = _shown(question.decodes, choice.decode_id)
    seen = len(question.prefills) + len(question.decodes)
    return Basis(
        policy=policy,
        asked=question.asked,
        engines=[*prefills, *decodes],
        left_out=seen - len(prefills) - len(decodes),
        canary=canary,
        prompt_tokens=question.prompt_tokens,
        head=question.head,
    )


def _shown(engines: Sequence[EngineView], chosen: str) -> Sequence[EngineView]:
    if len(engines) <= ENGINES_MAX:
        return engines
    first = engines[:ENGINES_MAX]
    if not chosen or any(engine.engine_id == chosen for engine in first):
        return first
    return [*first[:-1], *(engine for engine in engines if engine.engine_id == chosen)]
