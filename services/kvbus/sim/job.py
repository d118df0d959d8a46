"""One request of a client: the production life cycle of a dispatch, with legs that are events instead of HTTP.

Both legs go out at once (early) or decode's after prefill's (deferred); `router/core.py` says when to cancel, to retry
and to give up. Clients leave; a router may die, which closes its connections.
"""

from typing import TYPE_CHECKING, Any

from kvbus.router.core import Dispatch, Facts, Leg, Verdict
from kvbus.router.fleet import Engine
from kvbus.router.policies import RouteChoice
from kvbus.sim.engine import SimEngine
from kvbus.sim.memory import Tokens
from kvbus.sim.request import Request
from kvbus_schemas import EVERYONE, Mode

if TYPE_CHECKING:
    from kvbus.sim.router import SimRouter

HTTP_S = 0.002
OK, BAD_REQUEST = 200, 400
ATTEMPTS_MAX = 2
NO_ENGINE_WAIT_S = 1.0


class SimLeg:
    """One HTTP request to one engine, seen from both ends."""

    def __init__(self, job: "Job", dispatch: Dispatch, leg: Leg, engine: SimEngine) -> None:
        self.job, self.dispatch, self.leg, self.engine = job, dispatch, leg, engine
        self.request_ids: list[str] = []
        """What the engine calls it: one for each prompt."""
        self.closed = False
        self._first = True
        self._over = 0

    def sampled(self, request: Request) -> None:
        """The engine has a token for it; the last one of its last prompt ends the answer."""
        if len(request.tokens) - len(request.prompt_token_ids) >= request.max_new:
            self.engine.legs.pop(request.request_id, None)
            self._over += 1
        over = self._over == len(self.job.prompts)
        if self.leg == "prefill":
            if over:
                self.job.router.later(self.job.answered, self, OK, request.reply)
        elif self._first or over:
            self._first = False
            self.job.router.later(self.job.streamed, self, over)

    def broken(self) -> None:
        """The engine has died."""
        self.job.router.later(self.job.failed, self, "the connection broke")


class Job:
    """One request of a client, over all its dispatches."""

    def __init__(
        self,
        router: "SimRouter",
        request_id: str,
        prompts: tuple[Tokens, ...],
        max_new: int,
        mode: Mode,
        deadline_s: float,
        conversation: str = "",
    ) -> None:
        self.router, self.prompts, self.max_new, self.mode = router, prompts, max_new, mode
        self.facts = Facts(
            request_id=request_id, attempts_max=ATTEMPTS_MAX, parts=len(prompts), conversation=conversation
        )
        self.deadline_s = deadline_s
        self.until_s = router.world.now + deadline_s
        self.dispatch: Dispatch | None = None
        self.legs: dict[Leg, SimLeg] = {}
        self.outcome = ""
        self.transfer_ids: list[str] = []
        router.world.after(deadline_s, router.process, self.deadline)

    def start(self, attempt: int) -> None:
        """Dispatch it, if there are engines; wait for them otherwise."""
        if self.outcome:
            return
        router = self.router
        prefill, decode = router.pick("prefill"), router.pick("decode")
        if prefill is None or decode is None:
            router.world.after(NO_ENGINE_WAIT_S, router.process, self.start, attempt)
            return
        early = self.mode == "early"
        choice = RouteChoice(
            mode=self.mode, prefill_id=prefill.engine_id, decode_id=decode.engine_id if early else "", reason="sim"
        )
        transfer_id = router.new_transfer_id()
        self.transfer_ids.append(transfer_id)
        self.dispatch = Dispatch(
            self.facts, choice, transfer_id=transfer_id, attempt=attempt, deadline_s=self.left_s(), prefill=prefill,
            decode=decode if early else None,
        )  # fmt: skip
        self.bind(self.dispatch)
        what = f"dispatches {self.facts.request_id} ({self.mode}), attempt {attempt}"
        router.world.tell(router.name, transfer_id, what)
        self.legs = {}
        self.send("prefill", prefill)
        if early:
            self.send("decode", decode)

    def bind(self, dispatch: Dispatch) -> None:
        """The dispatch may take something along."""

    def left_s(self) -> float:
        return max(self.until_s - self.router.world.now, 0.01)

    def send(self, name: Leg, engine: Engine) -> None:
        dispatch = self.dispatch
        assert dispatch is not None
        dispatch.sent(name)
        sim_engine = self.router.engines[engine.engine_id]
        leg = self.legs[name] = SimLeg(self, dispatch, name, sim_engine)
        params = self.router.params_of(dispatch, name)
        router, rng = self.router, self.router.world.rng
        delay_s = HTTP_S * rng.random()
        router.world.after(delay_s, None, router.arrive, leg, params, "")
        if rng.random() < router.bus.weather.twice:
            router.world.after(delay_s + rng.random(), None, router.arrive, leg, params, "-again")

    # Facts about the legs of the running dispatch.

    def answered(self, leg: SimLeg, status: int, params: dict[str, Any] | None = None) -> None:
        if self._stale(leg):
            return
        leg.closed = status != OK
        verdict = leg.dispatch.answered(leg.leg, status)
        self.obey(verdict)
        if leg.leg == "prefill" and self.mode == "deferred" and verdict.step == "go_on" and status == OK:
            self._choose_decode(leg.dispatch)

    def streamed(self, leg: SimLeg, over: bool) -> None:
        if self._stale(leg):
            return
        if not leg.dispatch.streaming:
            self.obey(leg.dispatch.answered("decode", OK))
        if over:
            leg.dispatch.ended()
            self.close("served")

    def failed(self, leg: SimLeg, detail: str) -> None:
        if not self._stale(leg):
            leg.closed = True
            self.obey(leg.dispatch.failed(leg.leg, detail))

    def leave(self) -> None:
        """The client closes its connection."""
        if self.outcome:
            return
        about = self.transfer_ids[-1] if self.transfer_ids else ""
        self.router.world.tell(self.router.name, about, "the client leaves")
        if self.dispatch is None:
            self.close("left")
        else:
            self.obey(self.dispatch.client_left())

    def vanish(self) -> None:
        """The router dies: its connections close and nobody says why."""
        if not self.outcome:
            for leg in self.legs.values():
                self._close_leg(leg)
            self.close("left")

    def deadline(self) -> None:
        if self.outcome:
            return
        if self.dispatch is None:
            self.close("failed")
        else:
            self.obey(self.dispatch.deadline_passed())

    def obey(self, verdict: Verdict) -> None:
        """As `serving.py`: publish, close, step."""
        router = self.router
        router.bus.publish(router.station, [post for post in verdict.posts if post.to != EVERYONE])
        for name in verdict.close:
            if name in self.legs:
                self._close_leg(self.legs[name])
        dispatch = self.dispatch
        assert dispatch is not None
        match verdict.step:
            case "retry":
                self.dispatch = None  # what else becomes of it concerns nobody
                router.world.after(0.01, router.process, self.start, dispatch.attempt + 1)
            case "give_up" | "break_off":
                self.close("failed")
            case "stop":
                self.close("left")
            case "pass_on" if not dispatch.streaming or verdict.close or verdict.posts:
                self.close("failed")
            case _:
                pass

    def close(self, outcome: str) -> None:
        self.outcome = self.outcome or outcome

    def _choose_decode(self, dispatch: Dispatch) -> None:
        decode = self.router.pick("decode")
        if decode is None:
            self.obey(dispatch.failed("decode", "no decode engine is known"))
            return
        choice = RouteChoice(mode="deferred", prefill_id="", decode_id=decode.engine_id, reason="sim")
        dispatch.decode_chosen(choice, decode, self.left_s())
        self.send("decode", decode)

    def _close_leg(self, leg: SimLeg) -> None:
        if leg.closed:
            return
        leg.closed = True
        for request_id in leg.request_ids:
            self.router.world.after(HTTP_S, leg.engine.process, leg.engine.abort, request_id)

    def _stale(self, leg: SimLeg) -> bool:
        return bool(self.outcome) or leg.closed or leg.dispatch is not self.dispatch
