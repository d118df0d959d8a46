"""The world of one seed with conversations: reuse, several prompts in a request, matchers in prefill engines."""

from random import Random

from kvbus.engine.settings import EngineSettings
from kvbus.reuse.settings import ReuseSettings
from kvbus.sim.bucket import KvServer
from kvbus.sim.bus import Station
from kvbus.sim.engine import SimEngine
from kvbus.sim.job import Job
from kvbus.sim.memory import Tokens
from kvbus.sim.reuse import SimReuse
from kvbus.sim.rules import Rules
from kvbus.sim.run import ALL_FAULTS, BLOCK_SIZE, Result, Sim
from kvbus.sim.talk import NAMES, NEW_MAX, TENANTS, TURN_MAX, Talk
from kvbus.sim.talk_engine import TalkEngine
from kvbus.sim.talk_rules import TalkRules
from kvbus.sim.turns import TurnJob
from kvbus_schemas import subjects

DEADLINES_S = (2.0, 5.0, 12.0)
PARTS_MAX = 3
PART_TOKENS_MAX = 7


class TalkSim(Sim):
    """A small world of a few conversations and a few requests of several prompts."""

    engine_type: type[SimEngine] = TalkEngine
    job_type: type[Job] = TurnJob
    rules_type: type[Rules] = TalkRules
    talks = True
    budgets, chunks = (6, 8, 24), (4, 8, 24)
    blocks_of_one = -(-(TURN_MAX + NEW_MAX) // BLOCK_SIZE)

    def ask(self, prompts: tuple[Tokens, ...], max_new: int, conversation: str = "") -> TurnJob:
        """A client's request, which has not started yet."""
        world = self.world
        rng = world.rng
        deadline_s = rng.choice(DEADLINES_S)
        request_id = f"q{len(self.router.jobs)}"
        job = TurnJob(self.router, request_id, prompts, max_new, rng.choice(self.modes), deadline_s, conversation)
        self.router.jobs.append(job)
        if rng.random() < self.weather.leave:
            world.after(0.3 * rng.random(), None, rng.choice((job.leave, job.leave, job.vanish)))
        return job

    def start_reuse(self) -> None:
        self._started += 1
        name = f"reuse-{self._started}"
        self.reuse.append(SimReuse(self.world, self.bus, self.presence, self.server, name, self.reuse_settings))

    def stations(self) -> list[Station]:
        return [*super().stations(), *(reuse.station for reuse in self.reuse if reuse.process.alive)]

    def restarted(self) -> None:
        super().restarted()
        self.server.restarted()
        self.bus.epoch += 1

    def _settings(self, rng: Random) -> EngineSettings:
        return EngineSettings(
            progressive=rng.random() < 0.7,
            matcher="engine" if rng.random() < 0.2 else "process",
            reuse_ttl_s=rng.choice((2.5, 8.0, 8.0)),
            reuse_min_tokens=rng.choice((1, 2, 4)),
            reuse_wait_s=rng.choice((1.0, 3.0, 6.0)),
            reuse_blocks_max=rng.choice((0.3, 0.5, 1.0)),
        )

    def _begin(self, rng: Random) -> None:
        ground = self.ground
        assert isinstance(self.rules, TalkRules)
        ground.after_step = self.rules.after_step
        ground.caching = {"prefill": rng.random() < 0.3, "decode": rng.random() < 0.5}
        self.server = KvServer(self.world, self.weather)
        self.server.buckets[subjects.LEASES_BUCKET] = {}
        self.reuse_settings = ReuseSettings(
            min_tokens=ground.settings.reuse_min_tokens,
            margin_s=0.2,
            lifetime_max_s=30.0,
            storage=rng.choice(("file", "memory")),
            lanes=1,
            memory_max=rng.choice((2, 100)),
        )
        self._started = 0
        for _ in range(rng.choice((1, 2))):
            self.start_reuse()

    def _plan(self) -> None:
        rng, world = self.world.rng, self.world
        self.busy_s, self.deadline_s = max(self.busy_s, 6.0), DEADLINES_S[-1]
        talks = [(tenant, name) for name in NAMES for tenant in TENANTS]
        for tenant, name in talks[: rng.choice((1, 1, 2, 3))]:
            talk = Talk(self, tenant, name)
            at_s = 0.2 + rng.random() ** 2
            for _ in range(rng.choice((2, 3, 4))):
                self.arrivals_s.append(at_s)
                world.after(at_s, self.router.process, talk.turn)
                at_s += rng.choice((0.05, 0.3, 0.6, 1.0, 3.0)) * (0.5 + rng.random())
        for _ in range(rng.choice((0, 0, 1, 2))):
            prompts = tuple(self._part(rng) for _ in range(rng.randrange(1, PARTS_MAX + 1)))
            at_s = 0.2 + 2.0 * rng.random()
            self.arrivals_s.append(at_s)
            world.after(at_s, self.router.process, self._several, prompts)

    def _part(self, rng: Random) -> Tokens:
        """So few different tokens that two prompts of a request are sometimes the same."""
        return tuple(rng.randrange(2) for _ in range(rng.randrange(1, PART_TOKENS_MAX + 1)))

    def _several(self, prompts: tuple[Tokens, ...]) -> None:
        self.ask(prompts, self.world.rng.randrange(1, NEW_MAX + 1)).start(1)


def run_talk_seed(seed: int, faults: frozenset[str] = ALL_FAULTS, *, tell: bool = False) -> Result:
    """A run is a pure function of its arguments."""
    return TalkSim(seed, faults, tell=tell).run()
