"""One run: build a small world out of a seed, let it happen, and judge it."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from kvbus.engine.identity import Identity
from kvbus.engine.settings import EngineSettings
from kvbus.sim.bus import Bus, Station
from kvbus.sim.clock import virtual_time
from kvbus.sim.engine import SimEngine
from kvbus.sim.ground import Ground
from kvbus.sim.job import Job
from kvbus.sim.matcher import Election, SimMatcher
from kvbus.sim.memory import Tokens
from kvbus.sim.reuse import SimReuse
from kvbus.sim.router import SimRouter
from kvbus.sim.rules import Rules
from kvbus.sim.shocks import Shocks
from kvbus.sim.weather import FAULTS, Weather, draw
from kvbus.sim.world import Line, Violation, World
from kvbus_schemas import Mode, Role

BLOCK_SIZE = 2
PROMPT_MAX, NEW_MAX = 9, 4
BLOCKS_MAX_OF_ONE = -(-(PROMPT_MAX + NEW_MAX) // BLOCK_SIZE)
SLACK_S = 40.0
"""After the last fault and the longest deadline, everything must have ended within this: two fences and repeats."""
ALL_FAULTS = frozenset(FAULTS)


@dataclass(slots=True)
class Result:
    """What a run has come to."""

    seed: int
    violations: list[Violation]
    story: list[Line]
    events: int
    counts: Counter[str] = field(default_factory=Counter)


class Sim:
    """The world of one seed."""

    engine_type: type[SimEngine] = SimEngine
    router_type: type[SimRouter] = SimRouter
    job_type: type[Job] = Job
    rules_type: type[Rules] = Rules
    modes: tuple[Mode, ...] = ("early", "early", "early", "deferred")
    talks = False
    blocks_of_one = BLOCKS_MAX_OF_ONE
    budgets, chunks = (3, 4, 8), (2, 3, 8)

    def __init__(self, seed: int, faults: frozenset[str] = ALL_FAULTS, *, tell: bool = False) -> None:
        self.world = World(seed, tell=tell)
        rng = self.world.rng
        self.weather: Weather = draw(rng, faults, reuse=self.talks)
        self.ground = Ground(self.world, self.weather, self._settings(rng))
        self.bus: Bus = self.ground.bus
        self.presence, self.fabric = self.ground.presence, self.ground.fabric
        self.reuse: list[SimReuse] = []
        self.rules = self.rules_type(self)
        self.bus.watch = self.rules.said
        self._begin(rng)
        self.election = Election(self.world)
        self._matchers = 0
        self.start_matcher()
        if "matcher" in self.weather.kinds:
            self.start_matcher()
        self.engines: dict[str, SimEngine] = {}
        self._incarnations: Counter[str] = Counter()
        self._tp = {"prefill": rng.choice((1, 1, 2)), "decode": rng.choice((1, 1, 2))}
        self._blocks = self.blocks_of_one + (rng.randrange(0, 3) if "memory" in self.weather.kinds else 12)
        self._budget, self._chunk = rng.choice(self.budgets), rng.choice(self.chunks)
        roles: tuple[Role, Role] = ("prefill", "decode")
        for role in roles:
            for number in range(rng.choice((1, 1, 2))):
                self.start_engine(f"{role}-{number}")
        self.router = self.router_type(self.world, self.bus, self.presence, self.engines)
        self.deadline_s = 0.0
        self.busy_s = 2.0 + 8.0 * bool(self.weather.shocks)
        self.arrivals_s: list[float] = []
        self._plan()
        self.shocks = Shocks(self, self.busy_s)

    def _settings(self, rng: Random) -> EngineSettings:
        return EngineSettings(progressive=rng.random() < 0.7)

    def _begin(self, rng: Random) -> None:
        """What else a world has; its first events are still to come."""

    def start_reuse(self) -> None:
        """A new reuse process, where there are some."""

    def restarted(self) -> None:
        """The server has lost what it had in memory."""
        self.presence.forget_all()

    def start_engine(self, engine_id: str) -> None:
        """A new incarnation."""
        self._incarnations[engine_id] += 1
        role: Role = "prefill" if engine_id.startswith("prefill") else "decode"
        shape = Identity(
            engine_id=engine_id,
            incarnation=f"i{self._incarnations[engine_id]}",
            role=role,
            model="m",
            block_size=BLOCK_SIZE,
            num_blocks=self._blocks,
            tp_size=self._tp[role],
            pp_size=1,
            max_model_len=64,
            vllm_version="sim",
        )
        self.engines[engine_id] = self.engine_type(self.ground, shape, budget=self._budget, chunk=self._chunk)

    def crash(self, engine: SimEngine) -> None:
        engine.crash()
        self.presence.forget_dead()
        for leg in engine.legs.values():
            if leg is not None:
                leg.broken()

    def start_matcher(self) -> None:
        self._matchers += 1
        SimMatcher(self.world, self.bus, self.presence, self.election, f"matcher-{self._matchers}")

    def stations(self) -> list[Station]:
        """Everybody on the bus."""
        engines = [station for engine in self.engines.values() for station in engine.stations]
        return [*engines, *(matcher.station for matcher in self.election.candidates), self.router.station]

    def run(self) -> Result:
        with virtual_time(self.world):
            self._happen()
        world = self.world
        return Result(world.rng_seed, world.violations, world.story, world.events, world.counts)

    def _happen(self) -> None:
        world = self.world
        world.run(self.busy_s)
        if world.violations:
            return
        calm_s = max(self.busy_s, self.shocks.last_s)
        world.run(calm_s)
        self._calm()
        world.run(calm_s + self.deadline_s + SLACK_S)
        if not world.violations:
            self.rules.at_rest()

    def _calm(self) -> None:
        """The faults stop."""
        weather = self.weather
        weather.loss = weather.duplicate = weather.delay = weather.twice = 0.0
        weather.write_fail = weather.write_hang = weather.handshake_fail = 0.0

    def _plan(self) -> None:
        rng = self.world.rng
        prompts: list[Tokens] = []
        at_once = rng.random() < 0.4
        for number in range(rng.randrange(3, 7)):
            prompt = tuple(rng.randrange(100) for _ in range(rng.randrange(1, PROMPT_MAX + 1)))
            if prompts and rng.random() < 0.3:
                other = rng.choice(prompts)
                prompt = (other[: rng.randrange(len(other) + 1)] + prompt)[:PROMPT_MAX]
            prompts.append(prompt)
            at_s = 0.2 + (0.1 if at_once else self.busy_s - 0.5) * rng.random() ** 2
            self.arrivals_s.append(at_s)
            self.world.after(at_s, self.router.process, self._arrive, f"q{number}", prompt)

    def _arrive(self, request_id: str, prompt: Tokens) -> None:
        rng = self.world.rng
        deadline_s = rng.choice((2.0, 5.0, 12.0))
        self.deadline_s = max(self.deadline_s, deadline_s)
        mode = rng.choice(self.modes)
        job = self.job_type(self.router, request_id, (prompt,), rng.randrange(1, NEW_MAX + 1), mode, deadline_s)
        self.router.jobs.append(job)
        job.start(1)
        if rng.random() < self.weather.leave:
            self.world.after(0.3 * rng.random(), None, rng.choice((job.leave, job.leave, job.vanish)))


def run_seed(seed: int, faults: frozenset[str] = ALL_FAULTS, *, tell: bool = False) -> Result:
    """A run is a pure function of its arguments."""
    return Sim(seed, faults, tell=tell).run()
