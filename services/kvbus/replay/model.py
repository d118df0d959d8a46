"""What another policy would have done to the requests of a recording: a simple model, fitted to it. Pure.

Time to first token is taken to be `a + b * prompt bytes + c * queued bytes`, where queued are the prompts that the
engine has not finished at that moment, each by what is left of its time. The three numbers are fitted to the recorded
requests under the recorded choices. An estimate walks through the requests in the order of their arrival, with queues
as they would then be: a request stays at its prefill for its estimated time, at its decode for the recorded rest too.

A hit is a turn that meets an engine which had the conversation's turn before it. What the recording's own policy gets
from the same walk stands beside what was measured: that is the model's error, and no estimate is better than it. The
model knows nothing of batching, of cache evictions, of failures.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from kvbus.replay.fit import Fit, Point, fit, held_out_error_ms
from kvbus.replay.recording import Recording
from kvbus.replay.router import Answer, answer_of
from kvbus.replay.views import Asked, questions_of
from kvbus.router.policies import Policy, RouteQuestion
from kvbus_schemas import BlocksReady, BlocksRegistered, EngineView, RequestServed, RouteDecided, TransferClosed

SAMPLES_MIN = 8
"""With fewer requests nothing is estimated."""
MS = 1000.0
KIB = 1024

Choose = Callable[[Asked, RouteQuestion], tuple[str, str]]
"""Prefill and decode of a request; the prefill is empty where the decode computes it all."""


class Sample(msgspec.Struct, frozen=True):
    """A request as it was."""

    asked: Asked
    arrived_s: float
    ttft_ms: float
    rest_ms: float
    """From its first byte to its end."""
    cached: bool
    """Whether its prefill found part of the prompt in its own cache, or took it back from a decode."""


class Walked(msgspec.Struct, frozen=True):
    """A request in a walk."""

    prefill_id: str
    decode_id: str
    queued_bytes: float
    ttft_ms: float
    hit: bool | None
    """None: a first turn, or no conversation."""


class Estimate(msgspec.Struct, frozen=True):
    """A policy over a recording."""

    requests: int
    ttft_ms_mean: float
    ttft_ms_p50: float
    hit_rate: float | None
    """Of the turns after the first; None: there were none."""
    prefill_balance: float
    """Requests of the busiest prefill over the mean of all; 1 is even."""
    decode_balance: float


class Judged(msgspec.Struct, frozen=True):
    """What a policy would have done, what the model makes of the recording's own, and what was measured."""

    fit: dict[str, float]
    measured: Estimate
    own: Estimate
    other: Estimate
    error_ms: float
    """Mean distance of the model from a measured request, on requests that it was not fitted to."""
    error_share: float
    """The same over the mean measured time."""


def samples_of(recording: Recording) -> list[Sample]:
    """The requests that were answered, oldest first; attempts that failed are left out."""
    served = {event.key: (event, message) for event, message in recording.said() if isinstance(message, RequestServed)}
    cached = _cached(recording)
    found: dict[str, Sample] = {}
    for asked in questions_of(recording):
        if asked.event.key not in served:
            continue
        event, word = served[asked.event.key]
        if word.outcome != "completed" or word.ttft_ms <= 0:
            continue
        found.setdefault(
            asked.event.key,
            Sample(
                asked,
                event.at_s - word.duration_ms / MS,
                word.ttft_ms,
                word.duration_ms - word.ttft_ms,
                asked.event.key in cached or word.request_id in cached,
            ),
        )
    return sorted(found.values(), key=lambda sample: sample.arrived_s)


def _cached(recording: Recording) -> set[str]:
    """Transfers whose prefill had part of the prompt, and requests that took their conversation's KV back."""
    found: set[str] = set()
    taking: dict[str, str] = {}
    for event, message in recording.said():
        if isinstance(message, BlocksReady) and message.cached_tokens > 0:
            found.add(event.key)
        elif isinstance(message, BlocksRegistered) and message.reuse:
            taking[event.key] = message.request_id
        elif isinstance(message, TransferClosed) and message.outcome == "completed":
            found.add(taking.get(event.key, event.key if event.key in found else ""))
    return found - {""}


def judge(recording: Recording, policy: Policy) -> Judged | None:
    """The policy against the recording's own; None with fewer than SAMPLES_MIN answered requests."""
    samples = samples_of(recording)
    if len(samples) < SAMPLES_MIN:
        return None
    points = [
        Point(sample.asked.decided.prompt_bytes, walked.queued_bytes, sample.ttft_ms)
        for sample, walked in zip(samples, walk(samples, as_recorded, None), strict=True)
    ]
    fitted = fit(points)
    own = walk(samples, as_recorded, fitted)
    other = walk(samples, lambda asked, question: _engines(answer_of(policy, asked, question)), fitted)
    times = [sample.ttft_ms for sample in samples]
    error_ms = held_out_error_ms(points)
    taken_back = [sample.cached for sample, one in zip(samples, own, strict=True) if one.hit is not None]
    measured = msgspec.structs.replace(
        _estimate(samples, own, times), hit_rate=fmean(taken_back) if taken_back else None
    )
    return Judged(
        fit={"a_ms": fitted.a, "b_ms_per_kib": fitted.b * KIB, "c_ms_per_queued_kib": fitted.c * KIB},
        measured=measured,
        own=_estimate(samples, own, [walked.ttft_ms for walked in own]),
        other=_estimate(samples, other, [walked.ttft_ms for walked in other]),
        error_ms=error_ms,
        error_share=error_ms / fmean(times),
    )


def as_recorded(asked: Asked, _question: RouteQuestion) -> tuple[str, str]:
    """The recorded choice."""
    return asked.decided.prefill_id, asked.decided.decode_id


def _engines(answer: Answer) -> tuple[str, str]:
    """The answer's engines; where it failed, or leaves the decode for later, the recorded ones."""
    decided: RouteDecided = answer.asked.decided
    if answer.choice is None:
        return decided.prefill_id, decided.decode_id
    return answer.choice.prefill_id, answer.choice.decode_id or decided.decode_id


class _Stay(NamedTuple):
    """A request at an engine."""

    from_s: float
    to_s: float
    prompt_bytes: int


class _Busy:
    """Who has what until when."""

    def __init__(self) -> None:
        self._stays: dict[str, list[_Stay]] = {}

    def unfinished(self, engine_id: str, now_s: float) -> list[_Stay]:
        """The requests at an engine."""
        left = self._stays[engine_id] = [stay for stay in self._stays.get(engine_id, ()) if stay.to_s > now_s]
        return left

    def queued_bytes(self, engine_id: str, now_s: float) -> float:
        """Bytes of their prompts, each by what is left of its time."""
        return sum(
            stay.prompt_bytes * (stay.to_s - now_s) / max(stay.to_s - stay.from_s, 1e-9)
            for stay in self.unfinished(engine_id, now_s)
        )

    def add(self, engine_id: str, stay: _Stay) -> None:
        """One more."""
        self._stays.setdefault(engine_id, []).append(stay)


def walk(samples: Sequence[Sample], choose: Choose, fitted: Fit | None) -> list[Walked]:
    """Each request where `choose` sends it. Without a fit, times are the recorded ones."""
    busy, last = _Busy(), dict[str, tuple[str, str]]()
    found: list[Walked] = []
    for sample in samples:
        now_s, decided, question = sample.arrived_s, sample.asked.decided, sample.asked.question
        if fitted is not None:
            question = _with_queues(question, busy, now_s)
        prefill_id, decode_id = choose(sample.asked, question)
        computing = prefill_id or decode_id
        queued = busy.queued_bytes(computing, now_s)
        ttft_ms = fitted.ttft_ms(decided.prompt_bytes, queued) if fitted else sample.ttft_ms
        if prefill_id:
            busy.add(prefill_id, _Stay(now_s, now_s + ttft_ms / MS, decided.prompt_bytes))
        busy.add(decode_id, _Stay(now_s, now_s + (ttft_ms + sample.rest_ms) / MS, decided.prompt_bytes))
        before = last.get(decided.conversation) if decided.conversation else None
        hit = None if before is None else (computing in before or decode_id in before)
        if decided.conversation:
            last[decided.conversation] = (computing, decode_id)
        found.append(Walked(computing, decode_id, queued, ttft_ms, hit))
    return found


def _with_queues(question: RouteQuestion, busy: _Busy, now_s: float) -> RouteQuestion:
    """The question with the loads of the walk in the place of the recorded ones."""

    def now(view: EngineView) -> EngineView:
        return msgspec.structs.replace(view, running=len(busy.unfinished(view.engine_id, now_s)), waiting=0)

    return msgspec.structs.replace(
        question, prefills=[now(view) for view in question.prefills], decodes=[now(view) for view in question.decodes]
    )


def _estimate(samples: Sequence[Sample], walked: Sequence[Walked], times: Sequence[float]) -> Estimate:
    hits = [one.hit for one in walked if one.hit is not None]
    offered = {"prefill": set[str](), "decode": set[str]()}
    for sample in samples:
        for view in (*sample.asked.question.prefills, *sample.asked.question.decodes):
            offered[view.role].add(view.engine_id)
    return Estimate(
        requests=len(walked),
        ttft_ms_mean=fmean(times),
        ttft_ms_p50=median(times),
        hit_rate=fmean(hits) if hits else None,
        prefill_balance=_balance([one.prefill_id for one in walked], offered["prefill"]),
        decode_balance=_balance([one.decode_id for one in walked], offered["decode"]),
    )


def _balance(taken: Sequence[str], engines: set[str]) -> float:
    counts = Counter(name for name in taken if name in engines)
    return max(counts.values()) * len(engines) / counts.total() if counts else 1.0
