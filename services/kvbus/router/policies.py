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
NAMED_MAX = 8
"""Candidates that an answer names of each role."""


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
    prompt_tokens: int = 0
    """Length of the prompt, at a guess; 0: not known."""
    head: str = ""
    """Digest of how the prompt begins, equal where two prompts do; empty: not known."""
    free: bool = False
    """`asked` is pull since that is what stock engines do, not the client's wish: local will do as well."""


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
        return choice_of(question, self._next, "next in turn")

    def _next(self, engines: Sequence[EngineView], _question: RouteQuestion) -> list[Candidate]:
        role = engines[0].role
        turn = self._turns[role]
        self._turns[role] = turn + 1
        ordered = sorted(engines, key=_engine_id)
        chosen = turn % len(ordered)
        return ranked([*ordered[chosen:], *ordered[:chosen]], [1.0] + [0.0] * (len(ordered) - 1))


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
        return choice_of(question, self._scored, "least loaded")

    def _scored(self, engines: Sequence[EngineView], _question: RouteQuestion) -> list[Candidate]:
        self._turn += 1
        turned = in_turn(engines, self._turn)
        return ranked(turned, [load_score(engine) for engine in turned], _load_terms)


def load_score(engine: EngineView) -> float:
    """Of an engine by its load: minus its requests, minus its share of used blocks, plus what it holds already."""
    used = 1.0 - engine.free_blocks / engine.total_blocks if engine.total_blocks else 0.0
    return engine.hit_tokens / HELD_TOKENS_PER_REQUEST - engine.running - engine.waiting - used


def _load_terms(engine: EngineView) -> dict[str, float]:
    held = engine.hit_tokens / HELD_TOKENS_PER_REQUEST
    terms: dict[str, float] = {"running": -engine.running, "waiting": -engine.waiting, "used_blocks": -used_of(engine)}
    return terms | {"held_tokens": held} if held else terms


def used_of(engine: EngineView) -> float:
    """The share of an engine's blocks that requests and conversations hold; 0 where it is not known."""
    return 1.0 - engine.free_blocks / engine.total_blocks if engine.total_blocks else 0.0


def in_turn(engines: Sequence[EngineView], turn: int) -> Sequence[EngineView]:
    """The engines, beginning with another one in each turn, so that equals are taken one after the other."""
    at = turn % len(engines)
    return [*engines[at:], *engines[:at]] if at else engines


def ranked(
    engines: Sequence[EngineView],
    scores: Sequence[float],
    terms_of: Callable[[EngineView], dict[str, float]] = lambda _engine: {},
) -> list[Candidate]:
    """The best NAMED_MAX of the engines, best first; of equals the first."""
    best = sorted(range(len(engines)), key=scores.__getitem__, reverse=True)[:NAMED_MAX]
    return [
        Candidate(
            engine_id=engines[at].engine_id,
            role=engines[at].role,
            score=scores[at],
            terms=terms_of(engines[at]),
            load_age_ms=engines[at].load_age_ms,
        )
        for at in best
    ]


Ranking = Callable[[Sequence[EngineView], RouteQuestion], list[Candidate]]
"""Candidates of one role, best first."""


def choice_of(question: RouteQuestion, ranking: Ranking, reason: str) -> RouteChoice:
    """Take the best candidate of each role that the mode needs."""
    mode, why = mode_for(question)
    return choice_in(mode, question, ranking, f"{reason}; {why}")


def choice_in(mode: Mode, question: RouteQuestion, ranking: Ranking, reason: str) -> RouteChoice:
    """The same in a mode that is decided already."""
    candidates: list[Candidate] = []
    prefill_id = decode_id = ""
    if mode != "local" and question.part == "both":
        candidates = ranking(question.prefills, question)
        prefill_id = candidates[0].engine_id
    if mode != "deferred" or question.part == "decode":
        decodes = ranking(question.decodes, question)
        decode_id = decodes[0].engine_id
        candidates = candidates + decodes
    return RouteChoice(mode=mode, prefill_id=prefill_id, decode_id=decode_id, reason=reason, candidates=candidates)


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


def _engine_id(engine: EngineView) -> str:
    return engine.engine_id
