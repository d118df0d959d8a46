"""One rank: the production `RankSide` without its thread. Each turn of the thread is an event of the rank's process."""

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from kvbus.engine.facts import StepOrders
from kvbus.engine.landing import LandingCore
from kvbus.engine.link import Link
from kvbus.engine.peers import PRESENCE_RENEW_S, WRITE_MAX_S
from kvbus.engine.rank import RankSide
from kvbus.engine.writing import WritingCore
from kvbus.sim.bus import Bus, Station
from kvbus.sim.plane import SimPlane
from kvbus.sim.presence import Presence, Watcher
from kvbus.sim.world import Process, World
from kvbus_schemas import EngineCard, Message

RETRY_S = 0.25
QUIET_WAIT_S = WRITE_MAX_S + 1.0
"""How long a forward pass waits for WRITEs that read preempted blocks: `engine/rank.py` waits no longer either."""
T = TypeVar("T")


class SimLink(Link):
    """The production link's face: posts go to the simulated bus, freshness comes from the simulated bucket."""

    def __init__(self, bus: Bus, station: Station, presence: Presence, watcher: Watcher) -> None:  # no thread, no NATS
        self._sim_bus, self._station = bus, station
        self._presence, self._watcher = presence, watcher

    @property
    def connected(self) -> bool:
        return not self._station.cuts

    @property
    def lease(self) -> int:
        self._presence.own_seen_s(self._watcher)
        return self._watcher.own_lease

    def presence_fresh(self, within_s: float) -> bool:
        seen_s = self._presence.own_seen_s(self._watcher)
        return (self._sim_bus.world.now - seen_s) * self._station.process.rate <= within_s

    def post(self, posts: Any) -> None:
        if posts:
            self._sim_bus.publish(self._station, posts)


class _NeverWaits(threading.Condition):
    """In virtual time nothing changes while one waits."""

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        return predicate()


class SimRank(RankSide):
    """`news` is called when there is something to report to vLLM."""

    def __init__(
        self,
        world: World,
        process: Process,
        plane: SimPlane,
        writing: WritingCore,
        landing: LandingCore,
        link: SimLink,
        news: Callable[[], None],
    ) -> None:
        super().__init__(plane, writing, landing, link)
        self.world, self.process, self.sim_plane = world, process, plane
        self.news = news
        self.peers: dict[str, EngineCard] = {}
        self._changed = _NeverWaits(self._lock)
        self.sim_waits: tuple[set[str], float, Callable[[], None]] | None = None
        self.sim_renews = self.sim_retries = False

    def turn(self) -> None:
        """One turn of the rank's thread; while it waits for WRITEs to end, it does nothing else."""
        try:
            if self.sim_waits is not None:
                self._poll_writes()
            else:
                self._inbox.put(_nothing)
                self._turn()
        except Exception:
            self.world.violate("8", "", f"{self.process.name}: the thread failed: {traceback.format_exc(limit=-3)}")
        self._after_turn()

    def heard(self, message: Message) -> None:
        self.hear(message)
        self.turn()

    def card_seen(self, card: EngineCard) -> None:
        """As the connector: only engines of the other role are met."""
        if card.engine_id.partition("-")[0] != self.process.name.partition("-")[0]:
            self.peers[card.engine_id] = card
            self.seen(card)
            self.turn()

    def card_gone(self, engine_id: str) -> None:
        self.peers.pop(engine_id, None)
        self.gone(engine_id)
        self.turn()

    def begin(self, orders: StepOrders, ready: Callable[[], None]) -> None:
        """`before_forward`, which waits for WRITEs that read preempted blocks: `ready` is called when none does."""
        self.turn()
        pending = self._reading(orders.preempted)
        self.sim_waits = (pending, self.world.now + QUIET_WAIT_S, ready)
        self.world.after(QUIET_WAIT_S, self.process, self.turn)
        self._after_turn()

    def _after_turn(self) -> None:
        if self.sim_waits is not None:
            pending, until_s, ready = self.sim_waits
            if not pending & self._open.keys() or self.world.now >= until_s:
                self.sim_waits = None
                ready()
                self.world.after(0.0, self.process, self.turn)
        if self._waiting_for and not self.sim_retries:
            self.sim_retries = True
            self.world.after(RETRY_S, self.process, self._retry_turn)
        if not self.sim_renews and not self.writing.may_write and any(p.terms for p in self.writing.pushes.values()):
            self.sim_renews = True
            self.world.after(PRESENCE_RENEW_S * self.world.rng.random(), self.process, self._renewed)
        if self._sent or self._quiet or self.landing._reports.finished:  # noqa: SLF001  (what the next `results` would give)
            self.news()

    def _retry_turn(self) -> None:
        self.sim_retries = False
        self.turn()

    def _renewed(self) -> None:
        """Peers renew their cards, which is when a rank tries again what it could not write."""
        self.sim_renews = False
        for card in list(self.peers.values()):
            self.seen(card)
        self.turn()


def _nothing() -> None:
    return None
