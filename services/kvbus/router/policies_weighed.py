"""Policies that know the engines' caches: plain prefix affinity, and the default, which weighs everything. Pure.

The default answers three questions.

**Which prefill?** The one with the least to compute before it, REQUEST_BASE_TOKENS added for each request there, where
what it holds of this prompt, or gets back of its conversation, counts PREFIX_WEIGHT times. A prefix is worth more than
the time to compute it once: whoever computes it elsewhere makes that engine's queue longer for all who come after, and
drives out what others have there. So a request goes to another engine only when the queue at the one with the prefix
is that much longer; a prefix that everybody shares is short, and does not hold. `queued` and `prefix` say so.

**Which decode?** The one with the fewest requests, full memory counted as USED_REQUESTS more of them, those that wait
as WAITING_REQUESTS each, and what it holds of the prompt already as one less for HELD_TOKENS: moving tokens costs
little beside computing them, so that a conversation stays as long as its decode is about as busy as another one.

**Which mode?** In this order:
1. what the client asks for; `local` where no prefill is alive.
2. `local` for a prompt of at most LOCAL_TOKENS. That costs the decode's batch less than a step's time, and a hand-off
   costs two requests and some ten milliseconds. Not while the decode's blocks are short or many wait there.
3. `deferred` under pressure: where the chosen decode has less than PRESSED_FREE of its blocks free, and the prefill has
   more queued than the prompt itself. Registered early, the prompt's blocks would be held all the time that it queues.
4. `pull` on stock engines, else `early`.
"""

from collections.abc import Sequence

from kvbus.router.policies import (
    RouteChoice,
    RouteQuestion,
    choice_in,
    choice_of,
    in_turn,
    mode_for,
    ranked,
    used_of,
)
from kvbus_schemas import Candidate, EngineView, Mode

LOCAL_TOKENS = 64
"""What a decode computes itself. The same bound as for reuse: fewer tokens are not worth a transfer."""
LOCAL_WAITING_MAX = 4
"""Requests that wait at the decode, those included that this router has sent since its last report."""
PRESSED_FREE = 0.1
PREFIX_WEIGHT = 32.0
REQUEST_BASE_TOKENS = 4000
"""What a prompt costs beside its tokens: 0.1 s at 37,000 tokens/s (see `kvbus.goodput.costs`)."""
REQUEST_TOKENS = 1000
"""Prompt tokens that a request stands for on an engine of which nothing better is known."""
USED_REQUESTS = 32.0
WAITING_REQUESTS = 4.0
HELD_TOKENS = 20_000.0
USED_TOKENS = 64.0
"""Among prefills that would be done at the same time the emptier one: a full memory counts as so many tokens."""
DEGRADED_SHARE = 0.5
"""What a prefix counts for where the engine's cache is known only in part."""


class PrefixAware:
    """The engine that holds the longest beginning of the prompt, whatever its load; of equals the least loaded."""

    name = "prefix_aware"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """The longest prefix of each role."""
        return choice_of(question, self._longest, "longest prefix")

    def _longest(self, engines: Sequence[EngineView], _question: RouteQuestion) -> list[Candidate]:
        self._turn += 1
        turned = in_turn(engines, self._turn)
        loads = [engine.running + engine.waiting for engine in turned]
        worst = max(loads) + 1.0
        scores = [engine.hit_tokens - load / worst for engine, load in zip(turned, loads, strict=True)]
        return ranked(turned, scores, lambda engine: {"prefix": engine.hit_tokens, "running": -engine.running})


class Weighed:
    """The default; what it does is said above."""

    name = "weighed"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """Score both roles, then decide how they work together."""
        self._turn += 1
        mode, why = mode_for(question)
        decided = question.part == "decode" or mode == "local" or (question.asked is not None and not question.free)
        if decided:
            return choice_in(mode, question, self._ranked, f"{_about(question)}{why}")
        prefills, decodes = self._ranked(question.prefills, question), self._ranked(question.decodes, question)
        prefill, decode = _named(question.prefills, prefills[0]), _named(question.decodes, decodes[0])
        mode, why = _mode(question, mode, prefill, decode)
        return RouteChoice(
            mode=mode,
            prefill_id="" if mode == "local" else prefill.engine_id,
            decode_id="" if mode == "deferred" else decode.engine_id,
            reason=f"{_about(question, prefill)}{why}",
            candidates=[*([] if mode == "local" else prefills), *([] if mode == "deferred" else decodes)],
        )

    def _ranked(self, engines: Sequence[EngineView], question: RouteQuestion) -> list[Candidate]:
        turned = in_turn(engines, self._turn)
        if engines[0].role == "prefill":
            return ranked(turned, [_prefill_score(engine) for engine in turned], _prefill_terms)
        return ranked(turned, [_decode_score(engine) for engine in turned], _decode_terms)


def _prefill_score(engine: EngineView) -> float:
    """Minus the tokens that come first; this prompt's own, which are the same for all, are left out."""
    weight = PREFIX_WEIGHT if engine.cache != "degraded" else PREFIX_WEIGHT * DEGRADED_SHARE
    count = engine.running + engine.waiting
    queued = (engine.queued_tokens or count * REQUEST_TOKENS) + count * REQUEST_BASE_TOKENS
    used = 1.0 - engine.free_blocks / engine.total_blocks if engine.total_blocks else 0.0
    return weight * engine.hit_tokens - queued - used * USED_TOKENS


def _prefill_terms(engine: EngineView) -> dict[str, float]:
    weight = PREFIX_WEIGHT if engine.cache != "degraded" else PREFIX_WEIGHT * DEGRADED_SHARE
    count = engine.running + engine.waiting
    queued = (engine.queued_tokens or count * REQUEST_TOKENS) + count * REQUEST_BASE_TOKENS
    return {"prefix": weight * engine.hit_tokens, "queued": -queued, "used_blocks": -used_of(engine) * USED_TOKENS}


def _decode_score(engine: EngineView) -> float:
    used = 1.0 - engine.free_blocks / engine.total_blocks if engine.total_blocks else 0.0
    held = engine.hit_tokens / HELD_TOKENS
    return held - engine.running - engine.waiting * WAITING_REQUESTS - used * USED_REQUESTS


def _decode_terms(engine: EngineView) -> dict[str, float]:
    terms = {"running": -float(engine.running), "waiting": -engine.waiting * WAITING_REQUESTS}
    terms["used_blocks"] = -used_of(engine) * USED_REQUESTS
    return terms | {"held": engine.hit_tokens / HELD_TOKENS} if engine.hit_tokens else terms


def _mode(question: RouteQuestion, mode: Mode, prefill: EngineView, decode: EngineView) -> tuple[Mode, str]:
    pressed = bool(decode.total_blocks) and decode.free_blocks < decode.total_blocks * PRESSED_FREE
    if 0 < question.prompt_tokens <= LOCAL_TOKENS and not pressed and decode.waiting <= LOCAL_WAITING_MAX:
        return "local", f"only about {question.prompt_tokens} tokens to compute"
    if mode == "early" and pressed and prefill.queued_tokens > question.prompt_tokens - prefill.hit_tokens:
        return "deferred", "decode is short of blocks and prefill has a queue"
    return mode, "stock engines" if mode == "pull" else "default"


def _about(question: RouteQuestion, prefill: EngineView | None = None) -> str:
    """What was known of the prompt."""
    degraded = sum(engine.cache == "degraded" for engine in (*question.prefills, *question.decodes))
    known = f", {degraded} caches known in part" if degraded else ""
    if prefill is None or not prefill.hit_tokens:
        return f"weighed{known}; "
    state = f", {prefill.cache}" if prefill.cache else ""
    return f"{prefill.hit_tokens} of about {question.prompt_tokens} tokens are there{state}{known}; "


def _named(engines: Sequence[EngineView], candidate: Candidate) -> EngineView:
    return next(engine for engine in engines if engine.engine_id == candidate.engine_id)
