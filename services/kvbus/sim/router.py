"""A router: the production life cycle of a dispatch, with legs that are events instead of HTTP connections.

It knows engines by their cards, sends both legs at once (early) or decode's after prefill's (deferred), cancels,
retries and gives up as `router/core.py` says. Clients leave; a router may die, which closes its connections.
"""

from collections.abc import Callable
from typing import Any

from kvbus.router.core import Dispatch, Facts, Leg, Verdict
from kvbus.router.fleet import Engine
from kvbus.router.policies import RouteChoice
from kvbus.sim.bus import Bus, Station
from kvbus.sim.engine import SimEngine
from kvbus.sim.loop import Request
from kvbus.sim.memory import Tokens
from kvbus.sim.presence import Presence, Watcher
from kvbus.sim.world import World
from kvbus_schemas import EVERYONE, EngineCard, Mode, Role, TicketError, ticket_from_params

HTTP_S = 0.002
OK, BAD_REQUEST = 200, 400
ATTEMPTS_MAX = 2
NO_ENGINE_WAIT_S = 1.0


class SimLeg:
    """One HTTP request to one engine, seen from both ends."""

    def __init__(self, job: "Job", dispatch: Dispatch, leg: Leg, engine: SimEngine) -> None:
        self.job, self.dispatch, self.leg, self.engine = job, dispatch, leg, engine
        self.request_id = ""
        self.closed = False
        self._first = True

    def sampled(self, request: Request) -> None:
        """The engine has a token for it; the last one ends the answer."""
        over = len(request.tokens) - len(request.prompt_token_ids) >= request.max_new
        if over:
            self.engine.legs.pop(request.request_id, None)
        if self.leg == "prefill":
            self.job.router.later(self.job.answered, self, OK)
        elif self._first or over:
            self._first = False
            self.job.router.later(self.job.streamed, self, over)

    def broken(self) -> None:
        """The engine has died."""
        self.job.router.later(self.job.failed, self, "the connection broke")


class Job:
    """One request of a client, over all its dispatches."""

    def __init__(
        self, router: "SimRouter", request_id: str, prompt: Tokens, max_new: int, mode: Mode, deadline_s: float
    ) -> None:
        self.router, self.prompt, self.max_new, self.mode = router, prompt, max_new, mode
        self.facts = Facts(request_id=request_id, attempts_max=ATTEMPTS_MAX)
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
        what = f"dispatches {self.facts.request_id} ({self.mode}), attempt {attempt}"
        router.world.tell(router.name, transfer_id, what)
        self.legs = {}
        self.send("prefill", prefill)
        if early:
            self.send("decode", decode)

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

    def answered(self, leg: SimLeg, status: int) -> None:
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
        if leg.request_id:
            self.router.world.after(HTTP_S, leg.engine.process, leg.engine.abort, leg.request_id)

    def _stale(self, leg: SimLeg) -> bool:
        return bool(self.outcome) or leg.closed or leg.dispatch is not self.dispatch


class SimRouter:
    """One router process."""

    def __init__(self, world: World, bus: Bus, presence: Presence, engines: dict[str, SimEngine]) -> None:
        self.world, self.bus, self.engines = world, bus, engines
        self.name = "router"
        self.process = world.process(self.name, bus.weather.drift)
        self.station = Station(self.process, self.name, "r1", lambda message: None)
        self.known: dict[str, Engine] = {}
        self.jobs: list[Job] = []
        self._requests = 0
        presence.watch(Watcher(self.station, self._card_changed))

    def later(self, work: Callable[..., None], *args: object) -> None:
        """An answer travels to the router."""
        self.world.after(HTTP_S * self.world.rng.random(), self.process, work, *args)

    def pick(self, role: Role) -> Engine | None:
        there = [engine for engine in self.known.values() if engine.role == role]
        return self.world.rng.choice(there) if there else None

    def new_transfer_id(self) -> str:
        self._requests += 1
        return f"{self._requests:032x}"

    def arrive(self, leg: SimLeg, params: dict[str, Any], suffix: str) -> None:
        """A leg reaches its engine, whose HTTP server checks the ticket."""
        if leg.closed:
            return
        leg.engine = engine = self.engines[leg.engine.identity.engine_id]
        if not engine.process.alive:
            self.later(leg.job.failed, leg, "connection refused")
            return
        if not self.accepts(params, engine):
            self.later(leg.job.answered, leg, BAD_REQUEST)
            return
        job = leg.job
        request_id = self.engine_request_id(leg) + suffix
        if not suffix:
            leg.request_id = request_id
        max_new = 1 if leg.leg == "prefill" else job.max_new
        transfer_id = leg.dispatch.transfer_id
        request = Request(request_id, job.prompt, max_new, params, transfer_id, None if suffix else leg)
        self.world.after(0.0, engine.process, engine.submit, request)

    def params_of(self, dispatch: Dispatch, leg: Leg) -> dict[str, Any]:
        """`kv_transfer_params` of a leg."""
        return dispatch.ticket(leg).to_params()

    def accepts(self, params: dict[str, Any], engine: SimEngine) -> bool:
        """As the engine's ticket guard."""
        try:
            ticket = ticket_from_params(params)
            assert ticket is not None
            ticket.check(engine.identity.engine_id, engine.identity.incarnation)
        except TicketError:
            return False
        return True

    def engine_request_id(self, leg: SimLeg) -> str:
        """What the engine calls the request."""
        return f"{leg.job.facts.request_id}-{leg.leg[0]}{leg.dispatch.attempt}"

    def _card_changed(self, engine_id: str, card: EngineCard | None) -> None:
        if card is None:
            self.known.pop(engine_id, None)
        else:
            self.known[engine_id] = Engine(
                engine_id=engine_id, role=card.role, http_url=card.http_url, incarnation=card.incarnation
            )
