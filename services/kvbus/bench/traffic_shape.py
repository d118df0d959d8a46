"""The shape of somebody's traffic, and the conversations that it stands for. Pure: the same shape, the same traffic."""

import random

import msgspec

from kvbus.bench.handoff_client import prompt_of


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How clients behave. Tokens are counts, times are seconds."""

    conversations: int = 12
    turns: int = 4
    rate_per_s: float = 1.0
    """Conversations that begin in a second, on average (Poisson)."""
    gap_s: float = 2.0
    """Between the end of an answer and the next turn, on average (exponential)."""
    prompt_tokens: int = 600
    """Of a first turn."""
    overlap: float = 0.3
    """Share of the first prompt that all conversations have in common, 0 to 1: a system prompt."""
    new_tokens: int = 60
    """What each later turn adds to the history."""
    answer_tokens: int = 24
    seed: int = 0

    def longest(self) -> int:
        """Tokens of the last turn's prompt and answer."""
        return self.prompt_tokens + (self.turns - 1) * self.new_tokens + self.turns * self.answer_tokens


class Conversation(msgspec.Struct, frozen=True):
    """One client's turns. `added[n]` is what turn n adds to the history, `gaps_s[n]` passes before it."""

    start_s: float
    added: list[list[int]]
    gaps_s: list[float]


def conversations_of(shape: Shape, number: int) -> list[Conversation]:
    """The conversations of round `number`."""
    chance = random.Random(f"{shape.seed}-{number}")  # noqa: S311  (reproducible, not secret)
    shared = prompt_of(f"shared-{shape.seed}-{number}", round(shape.prompt_tokens * shape.overlap))
    found, start_s = [], 0.0
    for at in range(shape.conversations):
        name = f"{shape.seed}-{number}-{at}"
        first = shared + prompt_of(f"first-{name}", shape.prompt_tokens - len(shared))
        later = [prompt_of(f"turn-{name}-{turn}", shape.new_tokens) for turn in range(1, shape.turns)]
        gaps_s = [0.0, *(chance.expovariate(1.0) * shape.gap_s for _ in later)]
        found.append(Conversation(start_s, [first, *later], gaps_s))
        start_s += chance.expovariate(1.0) / shape.rate_per_s
    return found
