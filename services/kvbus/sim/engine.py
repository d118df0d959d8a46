"""One incarnation of a vLLM engine: a scheduler's process, a process per rank, their memory, and the engine loop.

A step: take what came in, schedule, build the ranks' orders; each rank waits for WRITEs that read preempted blocks,
computes, takes its orders and reports; the scheduler takes the reports of all ranks. An engine without requests does
not step. One that only waits is woken by a message, by news of a rank, or when something is due.
"""

import traceback
from collections.abc import Callable
from typing import Any

from kvbus.engine.consumer import State
from kvbus.engine.identity import MATCHES_ITSELF, Identity
from kvbus.engine.landing import LandingCore
from kvbus.engine.scheduler import SchedulerSide
from kvbus.engine.writing import WritingCore
from kvbus.sim.bus import Station
from kvbus.sim.ground import Ground, SimHandle
from kvbus.sim.loop import Loop
from kvbus.sim.memory import Memory, shards_of
from kvbus.sim.plane import SimPlane
from kvbus.sim.presence import Feed, Watcher
from kvbus.sim.rank import SimLink, SimRank
from kvbus.sim.request import Output, Request
from kvbus.sim.world import Process
from kvbus_schemas import EngineCard, Message

STEP_MIN_S, STEP_MAX_S = 0.002, 0.03
"""How long a forward pass takes."""
WAIT_MAX_S = 0.05
"""How long a waiting engine sleeps before it looks at its ranks' reports."""
DUE_MAX_S = 2.0
UNREAD_MAX_S = 1.0


class SimEngine:
    """`number` counts the incarnations of this engine_id."""

    view: Any = None
    """What the connector sees of vLLM's scheduler."""

    def __init__(self, ground: Ground, shape: Identity, *, budget: int, chunk: int) -> None:
        self.ground, self.identity = ground, shape
        world, weather = ground.world, ground.weather
        self.world, self.name = world, f"{shape.engine_id}.{shape.incarnation}"
        self.tp_size = shape.tp_size
        self.memory = Memory(world, self.name, shape.num_blocks, shape.block_size)
        self.memory.caching = ground.caching[shape.role]
        self.process = world.process(self.name, weather.drift)
        self.processes: list[Process] = []
        self.ranks: list[Any] = []
        self.watchers: list[Watcher] = []
        self.legs: dict[str, Any] = {}
        self.inbox: list[Callable[[], None]] = []
        self._wake_at_s: float | None = None
        self._turn = 0
        self._busy = self._news = False
        self.woken = False
        """It takes steps without requests as long as its connector has news."""
        self._results: list[tuple[set[str], set[str], set[str]]] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._failed: set[str] = set()
        self.station = Station(self.process, shape.engine_id, shape.incarnation)
        watcher = Watcher(self.station, own_id=shape.engine_id)
        self.side = self._make_side(SimLink(ground.bus, self.station, ground.presence, watcher))
        self.station.hear = self._hear
        watcher.changed = Feed(world, self.station, self.side.seen, self.side.engine_gone).changed
        self.loop = Loop(
            world, self.name, self.memory, self.side, budget=budget, chunk=chunk, awaits=self._transfer_awaited
        )
        self.loop.landed = self._landed
        self.watchers.append(watcher)
        stations = [self.station, *(self._add_rank(rank) for rank in range(shape.tp_size))]
        ground.bus.engines[shape.engine_id] = stations
        self.stations = stations
        ground.fabric.ends[(shape.engine_id, shape.incarnation)] = self
        ground.presence.announce(self._card(), self.station)
        for each in self.watchers:
            ground.presence.watch(each)

    def _make_side(self, link: SimLink) -> Any:
        return SchedulerSide(self.identity, self.ground.settings, link, SimHandle(self))

    def _transfer_awaited(self, request: Request) -> str:
        transfer_id: str = self.side.consumer.by_request[request.request_id]
        return transfer_id

    def _landed(self, request: Request) -> None:
        """Rule 2: a transfer whose data is used has been completed, and nothing else is told of it."""
        outcome = self.side.consumer.closed.get(request.awaits)
        if outcome != "completed":
            self.world.violate("2", request.awaits, f"{self.name} uses what has landed and says {outcome}")

    def _add_rank(self, number: int) -> Station:
        ground, me = self.ground, self.identity
        process = self.world.process(f"{self.name}-r{number}", ground.weather.drift)
        plane = SimPlane(ground.fabric, self.memory, process, number, me.tp_size)
        writing = WritingCore(
            me.engine_id, number, me.tp_size, me.block_size, 1, progressive=ground.settings.progressive
        )
        station = Station(process, f"{me.engine_id}-r{number}", me.incarnation)
        watcher = Watcher(station, own_id=me.engine_id)
        link = SimLink(ground.bus, station, ground.presence, watcher)
        landing = LandingCore(number, me.tp_size)
        rank = SimRank(self.world, process, plane, writing, landing, link, self._rank_news)
        station.hear, plane.poke = rank.heard, rank.turn
        watcher.changed = Feed(self.world, station, rank.card_seen, rank.card_gone).changed
        self.processes.append(process)
        self.ranks.append(rank)
        self.watchers.append(watcher)
        return station

    # The network and the card watch.

    def note(self, rank: int, note: bytes) -> None:
        """A landing note has arrived at a rank's NIC."""
        self.ranks[rank].sim_plane.arrived.append(note)
        self.world.after(0.002 * self.world.rng.random(), self.ranks[rank].process, self.ranks[rank].turn)

    def _rank_news(self) -> None:
        self.world.after(WAIT_MAX_S * self.world.rng.random(), self.process, self.nudge, 0.0)

    # HTTP.

    def submit(self, request: Request) -> None:
        """A request has come in over HTTP."""
        self.legs[request.request_id] = request.leg
        self.inbox.append(lambda: self.loop.add(request))
        self.nudge(0.0005)

    def abort(self, request_id: str) -> None:
        """Its HTTP connection was closed."""
        self.legs.pop(request_id, None)
        self.inbox.append(lambda: self.loop.abort(request_id))
        self.nudge(0.0005)

    def crash(self) -> None:
        """kill -9 of everything."""
        for process in (self.process, *self.processes):
            process.alive = False
        self.ground.fabric.crashed(self.memory)
        self.ground.presence.refresh(self.identity.engine_id)

    # The engine loop.

    def nudge(self, delay_s: float) -> None:
        """Step soon; a step that is under way looks again when it ends."""
        if self._busy:
            self._news = True
            return
        at_s = self.world.now + delay_s
        if self._wake_at_s is None or at_s < self._wake_at_s:
            self._wake_at_s = at_s
            self._turn += 1
            self.world.after(delay_s, self.process, self._step, self._turn)

    def _step(self, turn: int) -> None:
        if turn != self._turn or self._busy:
            return
        self._wake_at_s, self._news = None, False
        try:
            inbox, self.inbox = self.inbox, []
            for work in inbox:
                work()
            if not self._has_work():
                return
            output = self.loop.schedule()
            orders = self.side.build(output)
            self.loop.scheduled(output)
            self.ground.after_step(self)
        except Exception:
            self._dies()
            return
        self._busy = True
        self._results = []
        duration_s = 0.0005
        if output.total_num_scheduled_tokens:
            duration_s = self.world.rng.uniform(STEP_MIN_S, STEP_MAX_S)
        if not orders.preempted:
            self._forward(output, orders, duration_s)
            return
        left = len(self.ranks)

        def ready() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._forward(output, orders, duration_s)

        for rank in self.ranks:
            self.world.after(0.0002, rank.process, rank.begin, orders, ready)

    def _forward(self, output: Output, orders: Any, duration_s: float) -> None:
        if self.memory.lent:
            self.memory.forward_begins()
        for number, rank in enumerate(self.ranks):
            self.world.after(duration_s, rank.process, self._computed, number, output, orders)

    def _computed(self, number: int, output: Output, orders: Any) -> None:
        """In the rank's process: the forward pass has ended."""
        shards = shards_of(number, self.tp_size)
        for request, start, count in output.scheduled:
            self.memory.compute(request, shards, start, start + count)
        rank = self.ranks[number]
        rank.step(orders, None)
        self.world.after(0.001 * self.world.rng.random(), rank.process, rank.turn)
        results = rank.results(orders)
        self._take_news(rank)
        self.world.after(0.0003, self.process, self._reported, output, orders, results)

    def _reported(self, output: Output, orders: Any, result: tuple[set[str], set[str], set[str]]) -> None:
        self._results.append(result)
        if len(self._results) < self.tp_size:
            return
        sent, received, failed = self._aggregate()
        try:
            sampled = self.loop.update(output, received, failed, sent)
            self._updated()
        except Exception:
            self._dies()
            return
        self._busy = False
        for request in sampled:
            leg = self.legs.get(request.request_id)
            if leg is not None:
                leg.sampled(request)
        if output.total_num_scheduled_tokens or orders or sent or received or self._news or self.inbox:
            self.nudge(0.0003)
        elif self._has_work():
            self.nudge(self._due_s())

    # What a world adds to it.

    def _hear(self, message: Message) -> None:
        self.side.hear(message)

    def _has_work(self) -> bool:
        """Whether a step is taken."""
        return bool(self.loop.requests)

    def _take_news(self, rank: Any) -> None:
        """What else a rank reports with its results."""

    def _updated(self) -> None:
        """The scheduler has taken the reports of all ranks."""

    def _aggregate(self) -> tuple[set[str], set[str], set[str]]:
        """As `KVOutputAggregator`: a request is named when every rank has named it."""
        found: tuple[set[str], set[str], set[str]] = (set(), set(), set())
        if not any(any(result) for result in self._results):
            return found
        for result in self._results:
            for kind in (0, 1):
                for request_id in result[kind]:
                    count = self._counts.get((str(kind), request_id), 0) + 1
                    self._counts[(str(kind), request_id)] = count
                    if count == self.tp_size:
                        del self._counts[(str(kind), request_id)]
                        found[kind].add(request_id)
            self._failed |= result[2]
        found[2].update(self._failed & found[1])
        self._failed -= found[2]
        return found

    def _due_s(self) -> float:
        """When a tick of the cores has something to do."""
        side, process = self.side, self.process
        due = [waiting.again_s for waiting in side.consumer.open.values()]
        due += [w.deadline_s for w in side.consumer.open.values() if w.state is State.WAITING]
        due += [production.deadline_s for production in side.producer.open.values() if not production.released]
        if not due:
            return DUE_MAX_S
        now_s = process.offset_s + self.world.now * process.rate
        left_s: float = max(min(due) - now_s, 0.0) + 0.3 * self.world.rng.random()
        return min(left_s, DUE_MAX_S) + 0.001

    def _dies(self) -> None:
        text = traceback.format_exc(limit=-3)
        self.world.violate("4", "", f"{self.name}: the engine loop died: {text}")

    def _card(self) -> EngineCard:
        me = self.identity
        return EngineCard(
            source=me.engine_id,
            incarnation=me.incarnation,
            engine_id=me.engine_id,
            role=me.role,
            model=me.model,
            http_url="http://sim",
            block_size=me.block_size,
            num_blocks=me.num_blocks,
            tp_size=me.tp_size,
            capabilities=[MATCHES_ITSELF] if self.ground.settings.matcher == "engine" and me.role == "prefill" else [],
        )
