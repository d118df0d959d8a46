"""Conversations: who says what when. Turns that follow the last answer, edit it, fork, come again, or at once."""

from random import Random
from typing import TYPE_CHECKING

from kvbus.conversations import conversation_key
from kvbus.sim.loop import FIRST_SAMPLE
from kvbus.sim.memory import Tokens
from kvbus.sim.turns import TurnJob

if TYPE_CHECKING:
    from kvbus.sim.talk_run import TalkSim

TURN_MAX = 18
"""The longest prompt of a turn."""
NEW_MAX = 3
SECRET = b"the same for all routers"
TENANTS = ("a", "b")
NAMES = ("1", "2")
"""Both tenants use the same names for their conversations."""


class Talk:
    """One conversation of one tenant."""

    def __init__(self, sim: "TalkSim", tenant: str, name: str) -> None:
        self.sim, self.tenant = sim, tenant
        self.key = conversation_key(tenant, name, SECRET)
        self.said: Tokens = ()
        """All of it, as its client has it."""
        self.prompts: list[Tokens] = []

    def turn(self) -> None:
        """Its client asks, sometimes twice at once, whether or not the turn before has ended."""
        rng = self.sim.world.rng
        self._ask(self._prompt(rng))
        if rng.random() < 0.15:
            again = self.prompts[-1] if rng.random() < 0.5 else self._prompt(rng)
            self.sim.world.after(0.02 * rng.random(), self.sim.router.process, self._ask, again)

    def _prompt(self, rng: Random) -> Tokens:
        new = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 4)))
        said, draw = self.said, rng.random()
        if draw < 0.12 and said:
            at = rng.randrange(len(said))
            said = (*said[:at], 100 + rng.randrange(100), *said[at + 1 :])
        elif draw < 0.24:
            said = said[: rng.randrange(len(said) + 1)]
        elif draw < 0.36 and self.prompts:
            return self.prompts[-1]
        return (said + new)[:TURN_MAX]

    def _ask(self, prompt: Tokens) -> None:
        self.prompts.append(prompt)
        job = self.sim.ask((prompt,), self.sim.world.rng.randrange(1, NEW_MAX + 1), self.key)
        job.tenant, job.ended = self.tenant, self._ended
        job.start(1)

    def _ended(self, job: TurnJob) -> None:
        """The client has its answer and will send all of it next time."""
        if job.outcome == "served":
            said = job.prompts[0]
            for _ in range(job.max_new):
                said += (FIRST_SAMPLE + len(said),)
            self.said = said
