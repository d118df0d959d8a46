"""Turns of conversations: what `router/serving.py` does for reuse with the production `Turn`, by events."""

from collections.abc import Callable
from typing import Any

import msgspec

from kvbus.conversations_client import LATE_S
from kvbus.router.core import ENGINE_FAULT, Dispatch, Verdict
from kvbus.router.turn import Turn
from kvbus.sim.asking import Question
from kvbus.sim.job import Job, SimLeg
from kvbus_schemas import Message, Post, ReuseAnswered, ReuseAsked, ReuseReleased

ASK_S = 0.05
"""The router's `reuse_ask_ms`."""
LINGER_S = 5.0
"""The router's `prefill_linger_s`."""


class TurnJob(Job):
    """A request that belongs to a conversation, or to none."""

    tenant = ""
    ended: Callable[["TurnJob"], None] | None = None
    """Called once, at its end."""
    vanished = False
    """Its router has died."""
    _asked = False
    _asks = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.turn = Turn(self.facts.conversation)

    def start(self, attempt: int) -> None:
        router = self.router
        known = router.pick("prefill") is not None and router.pick("decode") is not None
        if attempt == 1 and known and self.turn.conversation and not self._asked and not self.outcome:
            self._ask()
        elif not self._asks:
            super().start(attempt)

    def bind(self, dispatch: Dispatch) -> None:
        turn = self.turn
        if turn.is_open:
            assert turn.grant is not None
            self._post(turn.bind(dispatch.mode, dispatch.prefill, self.router.known.get(turn.grant.holder_id)))
            dispatch.reuse = turn.grant

    def answered(self, leg: SimLeg, status: int, params: dict[str, Any] | None = None) -> None:
        if leg.leg == "prefill" and not leg.closed and self.turn.is_open:
            if status >= ENGINE_FAULT:
                self._post(self.turn.let_go("prefill_failed"))
            else:
                self._post(self.turn.reported(msgspec.json.encode(params) if params else None))
        super().answered(leg, status, params)

    def failed(self, leg: SimLeg, detail: str) -> None:
        if leg.leg == "prefill" and not leg.closed:
            self._post(self.turn.let_go("prefill_failed"))
        super().failed(leg, detail)

    def obey(self, verdict: Verdict) -> None:
        if "prefill" in verdict.close:
            self._post(self.turn.let_go("prefill_closed"))
        super().obey(verdict)

    def vanish(self) -> None:
        self.vanished = True
        self.turn = Turn()  # the router that knew of its claim is dead
        super().vanish()

    def close(self, outcome: str) -> None:
        first = not self.outcome
        super().close(outcome)
        if not first:
            return
        prefill = self.legs.get("prefill")
        if prefill is None:
            self._post(self.turn.let_go("not_dispatched"))
        elif not prefill.closed:
            self.router.world.after(LINGER_S, self.router.process, self._linger_over, prefill)
        if self.ended is not None:
            self.ended(self)

    # Inside.

    def _ask(self) -> None:
        router = self.router
        self._asked = self._asks = True
        asked = ReuseAsked(conversation=self.turn.conversation, request_id=self.facts.request_id)
        Question(router.bus, router.station, asked, self._claimed, wait_s=LATE_S)
        router.world.after(ASK_S, router.process, self._goes_on)

    def _claimed(self, answer: Message | None) -> None:
        """As `conversations_client.py`: what comes too late is let go."""
        answer = answer if isinstance(answer, ReuseAnswered) else None
        if not self._asks or self.outcome:
            self._asks = False
            grant = answer.grant if answer else None
            if grant is not None and grant.transfer_id:
                released = ReuseReleased(
                    conversation=grant.conversation, offer_id=grant.offer_id, transfer_id=grant.transfer_id,
                    reason="late",
                )  # fmt: skip
                self._post((Post(grant.holder_id, released),))
            return
        self.turn.answered(answer or ReuseAnswered(conversation=self.turn.conversation, miss="unavailable"))
        self._goes_on()

    def _goes_on(self) -> None:
        if self._asks:
            self._asks = False
            self.start(1)

    def _linger_over(self, leg: SimLeg) -> None:
        if not leg.closed:
            self._post(self.turn.let_go("prefill_closed"))
            self._close_leg(leg)

    def _post(self, posts: tuple[Post, ...]) -> None:
        if posts:
            self.router.bus.publish(self.router.station, list(posts))
