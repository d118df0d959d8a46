"""One dispatch of one request, from the choice of engines to its end. Pure: facts in, verdicts out.

A dispatch has one transfer id and one or two HTTP legs. Its shell (`serving.py`) sends the legs, reports each fact
that happens to them, publishes the verdict's posts, closes the legs that it names, and takes the step.

| fact                  | before the first byte to the client             | after it                    |
|-----------------------|-------------------------------------------------|-----------------------------|
| prefill answered 2xx  | go_on                                           | go_on                       |
| prefill failed        | early: cancel, go_on (decode computes it all)   | cancel, go_on               |
|                       | deferred, pull: cancel, retry or give_up        |                             |
| prefill answered 4xx  | deferred, pull: cancel, pass_on; early: failed  | cancel, go_on               |
| decode answered 2xx   | pass_on                                         | (none)                      |
| decode answered 4xx   | cancel, pass_on: the request is at fault        | (none)                      |
| ticket refused (400)  | as if the leg had failed                        | (none)                      |
| decode answered 5xx   | cancel, retry; the last attempt: pass_on        | (none)                      |
| decode failed         | cancel, retry or give_up                        | cancel, break_off           |
| no decode (deferred)  | cancel, stop                                    | (none)                      |
| client left           | cancel, stop                                    | cancel, stop                |
| deadline passed       | cancel, give_up                                 | cancel, break_off           |

"Cancel" publishes CancelOrdered to both engines, at most once per transfer, and closes the legs that are still open.
"""

from typing import Literal

import msgspec

from kvbus.router.basis import Basis
from kvbus.router.fleet import Engine
from kvbus.router.policies import RouteChoice
from kvbus.router.problems import EngineFailed, RouterProblem
from kvbus_schemas import EVERYONE, CancelOrdered, Mode, Post, RequestServed, ReuseGrant, RouteDecided, Ticket

Leg = Literal["prefill", "decode"]
Step = Literal["go_on", "pass_on", "retry", "give_up", "break_off", "stop"]

CANDIDATES_MAX = 16
"""Candidates named in a RouteDecided, the best first."""
DETAIL_CHARS_MAX = 300
NO_BASIS = Basis()
MODES: tuple[Mode, ...] = ("early", "deferred", "pull", "local")

_OK = 200
_CLIENT_FAULT = 400
ENGINE_FAULT = 500
CLIENT_LEFT_STATUS = 499
DEADLINE_STATUS = 504


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same over all dispatches of a request."""

    request_id: str
    trace_id: str = ""
    span_id: str = ""
    conversation: str = ""
    prompt_bytes: int = 0
    parts: int = 1
    attempts_max: int = 3


class Verdict(msgspec.Struct, frozen=True):
    """What the shell has to do now."""

    step: Step
    posts: tuple[Post, ...] = ()
    close: tuple[Leg, ...] = ()
    problem: RouterProblem | None = None


GO_ON = Verdict("go_on")
PASS_ON = Verdict("pass_on")


def deadline_problem() -> RouterProblem:
    """What a client is told whose time is up."""
    return EngineFailed(
        "the request was not finished within the router's deadline_s: ask for less or raise it",
        code="deadline_exceeded",
        status=DEADLINE_STATUS,
    )


class Dispatch:
    """`deadline_s` is what remains of the request's time, in seconds; `decided_us` what the policy took."""

    def __init__(
        self,
        facts: Facts,
        choice: RouteChoice,
        *,
        transfer_id: str,
        attempt: int,
        deadline_s: float,
        prefill: Engine | None,
        decode: Engine | None,
        reuse: ReuseGrant | None = None,
        basis: Basis = NO_BASIS,
    ) -> None:
        assert decode is not None or choice.mode == "deferred"
        assert (prefill is None) == (choice.mode == "local")
        self.facts = facts
        self.mode: Mode = choice.mode
        self.transfer_id = transfer_id
        self.attempt = attempt
        self.deadline_s = deadline_s
        self.prefill = prefill
        self.decode = decode
        self.reuse = reuse
        """What prefill may take over from a decode."""
        self.after_ms = 0.0
        """From the request's arrival to this dispatch."""
        self.work_tokens = 0
        """Prompt tokens that have to be computed for it, at a guess."""
        self.streaming = False
        self.open: set[Leg] = set()
        self._choice = choice
        self._basis = basis
        self._cancelled = False
        self._served = False
        self._over = False

    # Orders for the start

    def decided(self, decided_us: int) -> Post:
        """RouteDecided, to publish before a leg is sent; in mode deferred again when the decode is chosen."""
        facts, basis = self.facts, self._basis
        best = sorted(self._choice.candidates, key=lambda candidate: -candidate.score)
        return Post(
            EVERYONE,
            RouteDecided(
                transfer_id=self.transfer_id,
                request_id=facts.request_id,
                mode=self.mode,
                prefill_id=self.prefill.engine_id if self.prefill else "",
                decode_id=self.decode.engine_id if self.decode else "",
                policy=basis.policy,
                reason=self._choice.reason,
                candidates=best[:CANDIDATES_MAX],
                attempt=self.attempt,
                prompt_bytes=facts.prompt_bytes,
                conversation=facts.conversation,
                deadline_s=self.deadline_s,
                decided_us=decided_us,
                after_ms=self.after_ms,
                asked=basis.asked,
                engines=basis.engines,
                engines_left_out=basis.left_out,
                canary=basis.canary,
                prompt_tokens=basis.prompt_tokens,
                head=basis.head,
                trace_id=facts.trace_id,
                span_id=facts.span_id,
            ),
        )

    def decode_chosen(self, choice: RouteChoice, decode: Engine, deadline_s: float, basis: Basis = NO_BASIS) -> None:
        """Mode deferred: prefill is done and this decode takes over."""
        assert self.mode == "deferred"
        assert self.decode is None
        self._choice, self._basis = choice, basis
        self.decode = decode
        self.deadline_s = deadline_s

    def work_of(self, leg: Leg) -> int:
        """Prompt tokens that this leg's engine has to compute, at a guess."""
        return self.work_tokens if leg == "prefill" or self.mode == "local" else 0

    def ticket(self, leg: Leg) -> Ticket:
        """The ticket of a leg, in modes early and deferred; in mode local one by which decode keeps a conversation."""
        prefill, decode = self.prefill, self.decode
        return Ticket(
            transfer_id=self.transfer_id,
            role="produce" if leg == "prefill" else "consume",
            mode=self.mode,
            producer_id=prefill.engine_id if prefill else "",
            producer_incarnation=prefill.incarnation if prefill else "",
            consumer_id=decode.engine_id if decode else "",
            consumer_incarnation=decode.incarnation if decode else "",
            deadline_s=self.deadline_s,
            request_id=self.facts.request_id,
            trace_id=self.facts.trace_id,
            span_id=self.facts.span_id,
            parts=self.facts.parts,
            conversation=self.facts.conversation,
            reuse=self.reuse if leg == "prefill" else None,
        )

    # Facts

    def sent(self, leg: Leg) -> None:
        """The leg is on its way."""
        self.open.add(leg)

    def answered(self, leg: Leg, status: int, *, ticket_refused: bool = False) -> Verdict:
        """The leg's whole answer (prefill), or its first bytes (decode), are in. An engine that refuses its ticket has
        mostly been started again since it was chosen, so its answer is none for the client."""
        if ticket_refused:
            return self.failed(leg, "refused its ticket: it is not the one that was chosen")
        if leg == "prefill":
            self.open.discard("prefill")
        if _OK <= status < _CLIENT_FAULT:
            self.streaming = self.streaming or leg == "decode"
            return PASS_ON if leg == "decode" else GO_ON
        if self._has_last_word(leg, status):
            self.streaming = True
            return self._cancel("pass_on", f"{leg}_refused", keep=leg)
        return self.failed(leg, f"answered {status}")

    def failed(self, leg: Leg, detail: str) -> Verdict:
        """The leg could not be sent, broke off, or answered with an engine's error."""
        self.open.discard(leg)
        if leg == "prefill" and not self._prefill_first:
            return GO_ON if self._over else self._cancel("go_on", "prefill_failed", keep="decode")
        if self.streaming:
            return self._cancel("break_off", f"{leg}_failed", problem=self._engine_problem(leg, detail))
        step: Step = "retry" if self.attempt < self.facts.attempts_max else "give_up"
        return self._cancel(step, f"{leg}_failed", problem=self._engine_problem(leg, detail))

    def ended(self) -> Verdict:
        """The decode's answer is complete. A prefill that is still open is none of the client's business."""
        self.open.discard("decode")
        self._over = True
        return Verdict("stop")

    def client_left(self) -> Verdict:
        """The client closed its connection before its answer was complete."""
        return self._cancel("stop", "client_left")

    def deadline_passed(self) -> Verdict:
        """The request's time is up."""
        step: Step = "break_off" if self.streaming else "give_up"
        return self._cancel(step, "deadline", problem=deadline_problem())

    def undecided(self) -> Verdict:
        """Mode deferred: prefill is done, and no decode can be chosen."""
        return self._cancel("stop", "no_decode")

    def served(
        self,
        outcome: Literal["completed", "failed", "cancelled", "retried"],
        status: int,
        *,
        ttft_ms: float = 0.0,
        duration_ms: float = 0.0,
        error: str = "",
    ) -> tuple[Post, ...]:
        """The last word on this dispatch; said once."""
        if self._served:
            return ()
        self._served = True
        word = RequestServed(
            transfer_id=self.transfer_id,
            request_id=self.facts.request_id,
            mode=self.mode,
            outcome=outcome,
            status=status,
            ttft_ms=ttft_ms,
            duration_ms=duration_ms,
            attempt=self.attempt,
            error=error[:DETAIL_CHARS_MAX],
            conversation=self.facts.conversation,
            trace_id=self.facts.trace_id,
            span_id=self.facts.span_id,
        )
        return (Post(EVERYONE, word),)

    def _has_last_word(self, leg: Leg, status: int) -> bool:
        """The request is at fault, or no dispatch is left that could do better than the engine's own error."""
        if _CLIENT_FAULT <= status < ENGINE_FAULT:
            return leg == "decode" or self._prefill_first
        return leg == "decode" and self.attempt >= self.facts.attempts_max

    @property
    def _prefill_first(self) -> bool:
        return self.mode in {"deferred", "pull"}

    def _engine_problem(self, leg: Leg, detail: str) -> RouterProblem:
        engine = self.prefill if leg == "prefill" else self.decode
        name = engine.engine_id if engine else "?"
        return EngineFailed(f"{leg} engine {name} failed: {detail[:DETAIL_CHARS_MAX]}. Its log says more; try again")

    def _cancel(
        self, step: Step, reason: str, *, keep: Leg | None = None, problem: RouterProblem | None = None
    ) -> Verdict:
        close: tuple[Leg, ...] = tuple(leg for leg in ("prefill", "decode") if leg in self.open and leg != keep)
        self.open.difference_update(close)
        return Verdict(step, self._cancel_posts(reason), close, problem)

    def _cancel_posts(self, reason: str) -> tuple[Post, ...]:
        if self._cancelled or self.mode not in {"early", "deferred"}:
            return ()
        self._cancelled = True
        order = CancelOrdered(
            transfer_id=self.transfer_id,
            reason=reason,
            consumer_id=self.decode.engine_id if self.decode else "",
            trace_id=self.facts.trace_id,
            span_id=self.facts.span_id,
        )
        return tuple(Post(engine.engine_id, order) for engine in (self.prefill, self.decode) if engine is not None)
