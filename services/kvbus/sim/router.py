"""A router process: the engines that it knows by their cards, and its connections to them."""

from collections.abc import Callable
from typing import Any

from kvbus.engine.facts import prompt_digest
from kvbus.router.core import Dispatch, Leg
from kvbus.router.fleet import Engine
from kvbus.sim.bus import Bus, Station
from kvbus.sim.engine import SimEngine
from kvbus.sim.job import BAD_REQUEST, HTTP_S, Job, SimLeg
from kvbus.sim.presence import Presence, Watcher
from kvbus.sim.request import Request
from kvbus.sim.world import World
from kvbus_schemas import EngineCard, Role, TicketError, ticket_from_params


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
        max_new = 1 if leg.leg == "prefill" else job.max_new
        for number, prompt in enumerate(job.prompts):
            request_id = self.engine_request_id(leg) + suffix + (f"-{number}" if number else "")
            if not suffix:
                leg.request_ids.append(request_id)
            transfer_id = leg.dispatch.transfer_id
            if len(job.prompts) > 1:
                transfer_id += f"-{prompt_digest(transfer_id, list(prompt), len(prompt))}"
            request = Request(request_id, prompt, max_new, params, transfer_id, None if suffix else leg)
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
