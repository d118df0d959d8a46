"""Policies that know the engines' caches: plain prefix affinity, and the default, which weighs everything. Pure.

The default answers three questions.

**Which prefill?** The one with the least to compute before it, where each request there counts as REQUEST_BASE_TOKENS
and as OWN_WEIGHT times what this one has to compute, and what the engine holds of this prompt, or gets back of its
conversation, counts PREFIX_WEIGHT times. A prefix is worth more than the time to compute it once: whoever computes it
elsewhere makes that engine's queue longer for all who come after, and drives out what others have there. So a request
goes to another engine only when the queue at the one with the prefix is that much longer; a prefix that everybody
shares is short, and does not hold. And who computes much goes where few come, since all who come next wait for it.
`prefix`, `queued` and `held_up` say so.

**Which decode?** The one with the fewest requests, full memory counted as USED_REQUESTS more of them, those that wait
as WAITING_REQUESTS each, and what it holds of the prompt already as one less for HELD_TOKENS: moving tokens costs
little beside computing them, so that a conversation stays as long as its decode is about as busy as another one.

**Which mode?** In this order:
1. what the client asks for; `local` where no prefill is alive.
2. `local` for a prompt of at most LOCAL_TOKENS. That costs the decode's batch less than a step's time, and a hand-off
   costs two requests and some ten milliseconds. Not while the decode's blocks are short or many wait there.
3. `local` as well where prefill has LOCAL_QUEUE_TOKENS or more queued, LOCAL_QUEUE_WEIGHT times what the decode would
   have to compute, of which it has not more than LOCAL_MAX_TOKENS at a time: the batch stands still for less time than
   the prompt would wait. A decode that keeps what a conversation has had so far computes only what is new.
4. `deferred` under pressure: where the chosen decode has less than PRESSED_FREE of its blocks free, and the prefill has
   more queued than the prompt itself. Registered early, the prompt's blocks would be held all the time that it queues.
5. `pull` on stock engines, else `early`.
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
LOCAL_QUEUE_TOKENS = 40_000
"""A second of prefill's time."""
LOCAL_QUEUE_WEIGHT = 8
LOCAL_MAX_TOKENS = 32_768
"""A few steps of the batch: vLLM computes a prompt in chunks between which it goes on."""
LOCAL_WAITING_MAX = 4
"""Requests that wait at the decode, those included that this router has sent since its last report."""
PRESSED_FREE = 0.1
PREFIX_WEIGHT = 128.0
REQUEST_BASE_TOKENS = 4000
"""What a prompt costs beside its tokens: 0.1 s at 37,000 tokens/s (see `kvbus.goodput.costs`)."""
OWN_WEIGHT = 2.0
REQUEST_TOKENS = 1000
"""Prompt tokens that a request stands for on an engine of which nothing better is known."""
USED_REQUESTS = 32.0
WAITING_REQUESTS = 4.0
HELD_TOKENS = 20_000.0
USED_TOKENS = 64.0
"""Among prefills that would be done at the same time the emptier one: a full memory counts as so many tokens."""
DEGRADED_SHARE = 0.5
"""What a prefix counts for where the engine's cache is known only in part."""
CACHED_SHARE = {"exact": 1.0, "degraded": DEGRADED_SHARE, "": 0.0}
"""Of a decode's prefix, what it need not compute; without a cache it is held for a prefill to take back."""


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
        if engines[0].role == "decode":
            return ranked(turned, [_decode_score(engine) for engine in turned], _decode_terms)
        tokens = question.prompt_tokens
        scores = [_prefill_score(engine, tokens) for engine in turned]
        return ranked(turned, scores, lambda engine: _prefill_terms(engine, tokens))


def _prefill_score(engine: EngineView, prompt_tokens: int) -> float:
    """Minus the tokens that come first; this prompt's own, which are the same for all, are left out."""
    weight = PREFIX_WEIGHT if engine.cache != "degraded" else PREFIX_WEIGHT * DEGRADED_SHARE
    used = 1.0 - engine.free_blocks / engine.total_blocks if engine.total_blocks else 0.0
    held_up = _held_up(engine, prompt_tokens)
    return weight * engine.hit_tokens - _queued(engine) - held_up - used * USED_TOKENS


def _prefill_terms(engine: EngineView, prompt_tokens: int) -> dict[str, float]:
    weight = PREFIX_WEIGHT if engine.cache != "degraded" else PREFIX_WEIGHT * DEGRADED_SHARE
    return {
        "prefix": weight * engine.hit_tokens,
        "queued": -float(_queued(engine)),
        "held_up": -_held_up(engine, prompt_tokens),
        "used_blocks": -used_of(engine) * USED_TOKENS,
    }


def _queued(engine: EngineView) -> int:
    """Tokens that a prefill computes first."""
    count = engine.running + engine.waiting
    return (engine.queued_tokens or count * REQUEST_TOKENS) + count * REQUEST_BASE_TOKENS


def _held_up(engine: EngineView, prompt_tokens: int) -> float:
    """What those who come next wait for it."""
    own = prompt_tokens - engine.hit_tokens
    return (engine.running + engine.waiting) * OWN_WEIGHT * own if own > 0 else 0.0


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
    if question.prompt_tokens > 0 and not pressed and decode.waiting <= LOCAL_WAITING_MAX:
        if question.prompt_tokens <= LOCAL_TOKENS:
            return "local", f"only about {question.prompt_tokens} tokens to compute"
        if mode == "early" and (tokens := _better_local(question.prompt_tokens, prefill, decode)):
            return "local", f"about {tokens} tokens to compute, and prefill has {_queued(prefill)} queued"
    if mode == "early" and pressed and prefill.queued_tokens > question.prompt_tokens - prefill.hit_tokens:
        return "deferred", "decode is short of blocks and prefill has a queue"
    return mode, "stock engines" if mode == "pull" else "default"


def _better_local(prompt_tokens: int, prefill: EngineView, decode: EngineView) -> int:
    """How many tokens the decode had better compute itself, since prefill has so much more to do; 0: it had not."""
    queued = _queued(prefill)
    missing = max(1, prompt_tokens - int(decode.hit_tokens * CACHED_SHARE[decode.cache]))
    if queued < max(LOCAL_QUEUE_TOKENS, missing * LOCAL_QUEUE_WEIGHT):
        return 0
    return missing if decode.queued_tokens + missing <= LOCAL_MAX_TOKENS else 0


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
