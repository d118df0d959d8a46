"""Policies that spread requests without weighing them: random, power of two choices, session affinity. Pure.

Chance is drawn from the request's id, so that a recorded question is answered the same way once more.
"""

from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

from kvbus.router.policies import RouteChoice, RouteQuestion, choice_of, load_score, ranked
from kvbus_schemas import Candidate, EngineView

SEEDS_MAX = 10_000
"""Engines whose seeds are kept."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(number: int) -> int:
    """A number of 64 bits that looks like chance (the finaliser of SplitMix64)."""
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def drawn(question: RouteQuestion, role: str) -> int:
    """64 bits of chance for one role of one dispatch."""
    return mixed(crc32(f"{question.request_id}\0{question.attempt}\0{question.part}\0{role}".encode()))


class Random:
    """Any engine, each as likely as another."""

    name = "random"

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """One of each role."""
        return choice_of(question, self._one, "by chance")

    def _one(self, engines: Sequence[EngineView], question: RouteQuestion) -> list[Candidate]:
        at = drawn(question, engines[0].role) % len(engines)
        return ranked([*engines[at:], *engines[:at]], [1.0] + [0.0] * (len(engines) - 1))


class PowerOfTwo:
    """Two engines by chance, and of those the less loaded: nearly as even as the least loaded of all, and routers that
    know nothing of each other do not all run to the same one."""

    name = "power_of_two"

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """The less loaded of two of each role."""
        return choice_of(question, self._two, "less loaded of two")

    def _two(self, engines: Sequence[EngineView], question: RouteQuestion) -> list[Candidate]:
        chance, count = drawn(question, engines[0].role), len(engines)
        first = chance % count
        picked = [engines[first]]
        if count > 1:
            picked.append(engines[(first + 1 + (chance >> 32) % (count - 1)) % count])
        return ranked(picked, [load_score(engine) for engine in picked], _requests)


class SessionAffinity:
    """A conversation always to the same engines, and without one, prompts that begin alike; whatever their load.

    Rendezvous hashing: each engine draws for the conversation and the highest wins. So an engine that joins or leaves
    moves only the conversations that it wins or had, and routers need not agree about anything.
    """

    name = "session_affinity"

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """The winner of each role."""
        what = "conversation" if question.conversation else "prompt" if question.head else "request"
        return choice_of(question, self._drawn, f"the {what}'s own")

    def _drawn(self, engines: Sequence[EngineView], question: RouteQuestion) -> list[Candidate]:
        key = question.conversation or question.head or question.request_id
        number = int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        seeds = self._seeds
        draws = [
            (number * (seeds.get(engine.engine_id) or self._seed(engine.engine_id)) & _MASK) / _MASK
            for engine in engines
        ]
        return ranked(engines, draws)

    def _seed(self, engine_id: str) -> int:
        if len(self._seeds) >= SEEDS_MAX:
            self._seeds.clear()
        digest = blake2b(engine_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        seed = self._seeds[engine_id] = int.from_bytes(digest, "big") | 1
        return seed


def _requests(engine: EngineView) -> dict[str, float]:
    return {"running": -engine.running, "waiting": -engine.waiting}
