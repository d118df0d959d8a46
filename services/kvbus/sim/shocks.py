"""Faults that come as events: crashes, pauses, cuts. Every one ends, so that a run can come to rest."""

from typing import TYPE_CHECKING

from kvbus.sim.bus import Station
from kvbus.sim.engine import SimEngine
from kvbus.sim.weather import CUT_MAX_S, PAUSE_MAX_S
from kvbus.sim.world import Process

if TYPE_CHECKING:
    from kvbus.sim.run import Sim

RESTART_MAX_S = 8.0
NEAR_SHARE, NEAR_S = 0.6, 0.15
"""So many faults come within so many seconds of a request, where they hurt most."""


class Shocks:
    """Draws when and whom, and sees to it that it ends."""

    def __init__(self, sim: "Sim", busy_s: float) -> None:
        self.sim, self.world = sim, sim.world
        self.last_s = 0.0
        """When the last fault is over."""
        rng = self.world.rng
        for kind in sim.weather.shocks:
            at_s = busy_s * rng.random()
            if rng.random() < NEAR_SHARE:
                at_s = rng.choice(sim.arrivals_s) + NEAR_S * rng.random()
            self.world.after(at_s, None, getattr(self, f"_{kind}"))

    def _span(self, longest_s: float) -> float:
        rng = self.world.rng
        span_s: float = longest_s * (rng.random() if rng.random() < 0.6 else rng.random() ** 3)
        self.last_s = max(self.last_s, self.world.now + span_s)
        return span_s

    def _engine(self) -> SimEngine:
        return self.world.rng.choice(list(self.sim.engines.values()))

    def _crash(self) -> None:
        engine = self._engine()
        if not engine.process.alive:
            return
        self.world.tell("world", "", f"kills {engine.name}")
        self.sim.crash(engine)
        self.world.after(self._span(RESTART_MAX_S), None, self.sim.start_engine, engine.identity.engine_id)

    def _pause(self) -> None:
        engine = self._engine()
        everything = [engine.process, *engine.processes]
        some = [everything, [engine.process], [engine.processes[-1]]][self.world.rng.randrange(3)]
        chosen = [process for process in some if process.alive and not process.paused]
        span_s = self._span(PAUSE_MAX_S)
        self.world.tell("world", "", f"pauses {', '.join(p.name for p in chosen)} for {span_s:.3f} s")
        for station in engine.stations:
            if station.process in chosen:
                self.sim.presence.freeze_own(station)
        for process in chosen:
            self.world.pause(process)
        self.sim.presence.refresh(engine.identity.engine_id)
        self.world.after(span_s, None, self._resume, engine, chosen)

    def _resume(self, engine: SimEngine, processes: list[Process]) -> None:
        self.world.tell("world", "", f"resumes {', '.join(process.name for process in processes)}")
        for process in processes:
            for watcher in engine.watchers:
                if watcher.station.process is process:
                    self.sim.presence.resumed(watcher)
            self.world.resume(process)
        self.sim.presence.refresh(engine.identity.engine_id)

    def _partition(self) -> None:
        """Some processes of one engine, or the router, no longer reach NATS; NIXL goes on."""
        rng = self.world.rng
        engine = self._engine()
        ranks, router = engine.stations[1:], [self.sim.router.station]
        stations = (engine.stations, engine.stations[:1], ranks, router)[rng.randrange(4)]
        self._cut_for(stations, self._span(CUT_MAX_S))

    def _nats(self) -> None:
        """The server restarts: everybody is cut off, and the bucket in its memory is empty afterwards."""
        self.sim.presence.up = False
        self._cut_for(self.sim.stations(), self._span(4.0))

    def _cut_for(self, stations: list[Station], span_s: float) -> None:
        names = ", ".join(station.process.name for station in stations)
        self.world.tell("world", "", f"cuts {names} off the bus for {span_s:.3f} s")
        for reuse in self.sim.reuse:
            if reuse.station in stations:
                reuse.note_listening()
        for station in stations:
            self.sim.presence.freeze_own(station)
            self.sim.bus.cut(station)
        self._refresh()
        self.world.after(span_s, None, self._heal, list(stations))

    def _heal(self, stations: list[Station]) -> None:
        self.world.tell("world", "", f"heals {', '.join(station.process.name for station in stations)}")
        if not self.sim.presence.up:
            self.sim.restarted()
            self.sim.presence.up = True
        for station in stations:
            self.sim.bus.heal(station)
        self._refresh()

    def _refresh(self) -> None:
        for engine_id in self.sim.engines:
            self.sim.presence.refresh(engine_id)
        self.sim.election.check()

    def _nixl(self) -> None:
        """An engine's NIC reaches nobody; the bus goes on."""
        engine_id = self._engine().identity.engine_id
        self.world.tell("world", "", f"cuts the NIC of {engine_id} off")
        self.sim.fabric.cut.add(engine_id)
        self.world.after(self._span(CUT_MAX_S), None, self.sim.fabric.cut.discard, engine_id)

    def _reuse(self) -> None:
        """A reuse process is killed and restarted, paused, or cut off the bus."""
        rng = self.world.rng
        alive = [reuse for reuse in self.sim.reuse if reuse.process.alive and not reuse.process.paused]
        if not alive:
            return
        reuse, span_s = rng.choice(alive), self._span(PAUSE_MAX_S)
        what = rng.choice(("kill", "pause", "cut"))
        if what == "cut":
            self._cut_for([reuse.station], span_s)
        elif what == "kill":
            self.world.tell("world", "", f"kills {reuse.process.name}")
            reuse.crash()
            self.world.after(span_s * rng.random(), None, self.sim.start_reuse)
        else:
            self.world.tell("world", "", f"pauses {reuse.process.name} for {span_s:.3f} s")
            self.world.pause(reuse.process)
            self.world.after(span_s, None, self.world.resume, reuse.process)

    def _matcher(self) -> None:
        """A matcher is killed and restarted, paused, or cut off the bus."""
        rng = self.world.rng
        matcher = rng.choice(self.sim.election.candidates) if self.sim.election.candidates else None
        if matcher is None or matcher.process.paused:
            return
        span_s = self._span(PAUSE_MAX_S)
        what = rng.choice(("kill", "pause", "cut"))
        if what == "cut":
            self._cut_for([matcher.station], span_s)
            return
        if what == "kill":
            self.world.tell("world", "", f"kills {matcher.process.name}")
            matcher.crash()
            self.world.after(span_s, None, self.sim.start_matcher)
            return
        self.world.tell("world", "", f"pauses {matcher.process.name} for {span_s:.3f} s")
        self.world.pause(matcher.process)
        self.sim.election.check()

        def resume() -> None:
            self.world.resume(matcher.process)
            if matcher.process.alive:
                self.sim.election.resumed(matcher)

        self.world.after(span_s, None, resume)
