"""Policies: which prefill and which decode engine serve a request, and in which mode. Pure.

A policy is a class without arguments, named by an entry point of the group `kvbus.policies` or by `module:Class`.
It is asked once per dispatch, and in mode `deferred` a second time, for the decode, once prefill has finished.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, Protocol

import msgspec

from kvbus.errors import ConfigError
from kvbus_schemas import Candidate, EngineView, Mode

GROUP = "kvbus.policies"
HELD_TOKENS_PER_REQUEST = 1000.0
"""Tokens that an unfinished request stands for in `least_loaded`: a held token is worth as much as one in flight."""


class RouteQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know. The engines are alive, serve the model and have not failed this request before."""

    request_id: str
    model: str
    prompt_bytes: int
    """Size of the request's body: what is known of the prompt's length."""
    prefills: Sequence[EngineView]
    """Empty where none is alive, or where the request cannot be split."""
    decodes: Sequence[EngineView]
    """Never empty. In `waiting` are also the requests this router has sent since the engine's last report."""
    conversation: str = ""
    asked: Mode | None = None
    """The mode that the client asks for."""
    part: Literal["both", "decode"] = "both"
    """`decode`: prefill is done (mode deferred), only a decode is wanted."""
    attempt: int = 1


class RouteChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's answer. `prefill_id` is empty in mode local; `decode_id` may be empty in mode deferred."""

    mode: Mode
    prefill_id: str
    decode_id: str
    reason: str
    candidates: list[Candidate] = []


class Policy(Protocol):
    """What the router asks of a policy."""

    @property
    def name(self) -> str:
        """As it appears in RouteDecided."""
        ...

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """Choose. Must not block and must not keep what it was given."""
        ...


def load(name: str) -> Policy:
    """The policy of that name, or `module:Class`. Raises ConfigError where there is none."""
    known = {point.name: point for point in entry_points(group=GROUP)}
    found = EntryPoint(name=name, value=name, group=GROUP) if ":" in name else known.get(name)
    if found is None:
        raise ConfigError(f"unknown policy {name!r}: choose one of {', '.join(sorted(known))}, or give module:Class")
    try:
        policy: Policy = found.load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"policy {name!r} cannot be loaded: {error}") from error
    return policy


class RoundRobin:
    """Each engine of a role in its turn, whatever its load."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {"prefill": 0, "decode": 0}

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """The next in turn of each role."""
        return _choice(question, self._next, "next in turn")

    def _next(self, engines: Sequence[EngineView]) -> list[Candidate]:
        role = engines[0].role
        turn = self._turns[role]
        self._turns[role] = turn + 1
        chosen = turn % len(engines)
        return [
            Candidate(engine_id=engine.engine_id, role=role, score=float(at == chosen), load_age_ms=engine.load_age_ms)
            for at, engine in enumerate(sorted(engines, key=_engine_id))
        ]


class LeastLoaded:
    """The engine with the fewest unfinished requests; among equals the one with more free blocks, then in turn.

    A conversation's tokens that an engine holds count against its load: HELD_TOKENS_PER_REQUEST of them outweigh one
    unfinished request, since sending the turn there spares moving them once more. So a conversation stays where it is
    until its engine is busier than another one by more requests than that.
    """

    name = "least_loaded"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """The least loaded of each role."""
        return _choice(question, self._scored, "least loaded")

    def _scored(self, engines: Sequence[EngineView]) -> list[Candidate]:
        self._turn += 1
        turn = self._turn % len(engines)
        rotated = [*engines[turn:], *engines[:turn]] if turn else engines
        return [_scored(engine) for engine in rotated]


def _scored(engine: EngineView) -> Candidate:
    used = 1.0 - engine.free_blocks / engine.total_blocks if engine.total_blocks else 0.0
    held = engine.hit_tokens / HELD_TOKENS_PER_REQUEST
    terms: dict[str, float] = {"running": -engine.running, "waiting": -engine.waiting, "used_blocks": -used}
    return Candidate(
        engine_id=engine.engine_id,
        role=engine.role,
        score=-(engine.running + engine.waiting) - used + held,
        terms=terms | {"held_tokens": held} if held else terms,
        load_age_ms=engine.load_age_ms,
    )


def _choice(
    question: RouteQuestion, scored: Callable[[Sequence[EngineView]], list[Candidate]], reason: str
) -> RouteChoice:
    """Take the best candidate of each role that the mode needs."""
    mode, why = mode_for(question)
    candidates: list[Candidate] = []
    prefill_id = decode_id = ""
    if mode != "local" and question.part == "both":
        prefills = scored(question.prefills)
        prefill_id = max(prefills, key=_score).engine_id
        candidates += prefills
    if mode != "deferred" or question.part == "decode":
        decodes = scored(question.decodes)
        decode_id = max(decodes, key=_score).engine_id
        candidates += decodes
    return RouteChoice(
        mode=mode, prefill_id=prefill_id, decode_id=decode_id, reason=f"{reason}; {why}", candidates=candidates
    )


def mode_for(question: RouteQuestion) -> tuple[Mode, str]:
    """The mode and why: what the client asks for if it can be had, else early, else local."""
    if question.part == "decode":
        return "deferred", "prefill is done"
    if question.asked == "local":
        return "local", "asked for"
    if not question.prefills:
        return "local", "no prefill engine"
    if question.asked is not None:
        return question.asked, "asked for"
    return "early", "default"


def _score(candidate: Candidate) -> float:
    return candidate.score


def _engine_id(engine: EngineView) -> str:
    return engine.engine_id
