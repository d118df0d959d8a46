"""The world of one seed with engines that follow the stock push protocol, and what its users see of it.

The router is that of the stock example: both legs at once, the same X-Request-Id on both, no deadline. A client that
has left may ask again under the same X-Request-Id, as clients and proxies do.
"""

from typing import Any

from kvbus.router.core import Dispatch, Leg
from kvbus.sim.bus import Station
from kvbus.sim.engine import DUE_MAX_S, SimEngine
from kvbus.sim.job import Job, SimLeg
from kvbus.sim.presence import Watcher
from kvbus.sim.rank import SimLink
from kvbus.sim.request import Request
from kvbus.sim.router import SimRouter
from kvbus.sim.rules import Rules
from kvbus.sim.run import ALL_FAULTS, Result, Sim
from kvbus.sim.stock import StockPlane, StockRank, StockSide

RETRY_SHARE = 0.5
STOCK_FAULTS = {"wrong tokens": "wrong tokens", "3": "block leak", "2": "hang", "4": "EngineCore assertion"}
"""What the rules are called where users meet them."""


class StockEngine(SimEngine):
    """The same loop, memory and network, with the stock connector."""

    def _make_side(self, link: SimLink) -> Any:
        self.memory.strict = False
        return StockSide((self.identity.engine_id, self.identity.incarnation))

    def _landed(self, request: Request) -> None:
        return

    def _transfer_awaited(self, request: Request) -> str:
        return request.transfer_id

    def _add_rank(self, number: int) -> Station:
        ground, me = self.ground, self.identity
        process = self.world.process(f"{self.name}-r{number}", ground.weather.drift)
        plane = StockPlane(ground.fabric, self.memory, process, number, me.tp_size)
        rank = StockRank(
            self.world,
            process,
            plane,
            ground.fabric,
            me.tp_size,
            self._rank_news,
            guarded=bool(self.world.rng_seed % 2),
        )
        plane.poke = rank.turn
        station = Station(process, f"{me.engine_id}-r{number}", me.incarnation, rank.heard)
        self.processes.append(process)
        self.ranks.append(rank)
        self.watchers.append(Watcher(station, own_id=me.engine_id))
        return station

    def _due_s(self) -> float:
        now_s = self.world.local_s()
        due: list[float] = [until_s - now_s for rank in self.ranks for until_s in rank.to_send.values()]
        return min([DUE_MAX_S, *(max(each, 0.0) for each in due)]) + 0.001


class StockJob(Job):
    """A client of the stock router."""

    def leave(self) -> None:
        before = self.outcome
        super().leave()
        if not before and self.router.world.rng.random() < RETRY_SHARE:
            again = StockJob(self.router, self.facts.request_id, self.prompts, self.max_new, self.mode, self.deadline_s)
            self.router.jobs.append(again)
            self.router.world.after(0.05 * self.router.world.rng.random(), self.router.process, again.start, 1)

    def deadline(self) -> None:
        return  # `timeout=None`


class StockRouter(SimRouter):
    """What the stock router puts into `kv_transfer_params`."""

    def params_of(self, dispatch: Dispatch, leg: Leg) -> dict[str, Any]:
        assert dispatch.prefill is not None
        if leg == "prefill":
            return {"do_remote_decode": True}
        return {"do_remote_prefill": True, "remote_engine": (dispatch.prefill.engine_id, dispatch.prefill.incarnation)}

    def accepts(self, params: dict[str, Any], engine: SimEngine) -> bool:
        return True

    def engine_request_id(self, leg: SimLeg) -> str:
        return f"cmpl-{leg.job.facts.request_id}-{self.world.rng.getrandbits(32):08x}"


class StockRules(Rules):
    """What is left over when nothing goes wrong any more."""

    def _engine_at_rest(self, engine: SimEngine) -> None:
        for request in engine.loop.requests.values():
            text = f"{engine.name} still has {request.request_id}, {request.status}, with blocks {request.block_ids}"
            waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
            self.world.violate("2" if waits else "3", request.transfer_id, text)


class StockSim(Sim):
    """The world of one seed."""

    engine_type: type[SimEngine] = StockEngine
    router_type: type[SimRouter] = StockRouter
    job_type: type[Job] = StockJob
    rules_type: type[Rules] = StockRules
    modes = ("early",)


def run_stock_seed(seed: int, faults: frozenset[str] = ALL_FAULTS, *, tell: bool = False) -> Result:
    """A run is a pure function of its arguments."""
    return StockSim(seed, faults, tell=tell).run()
