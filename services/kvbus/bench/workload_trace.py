"""A multi-turn trace, scaled down, and what a cache could save of it at best. Pure, but for reading the file.

The trace is callanjfox/kv-cache-tester's (Apache-2.0): a session has requests with `in` and `out` tokens, `hash_ids`
(one for each block of 64 prompt tokens, local to the session, equal only where the prompts are equal up to there) and
`think_time`. Scaled down, a block is one token, so that prompts keep exactly the prefixes that they share.
"""

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbus.errors import ConfigError

BLOCK = 64
"""Tokens of the trace for each of its hash ids."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `idle_s` passes, in the trace's time, between the end of the turn before and this one."""

    idle_s: float
    ids: tuple[int, ...]
    """One for each token of the scaled prompt."""
    answer: int
    """Tokens of the scaled answer."""


class Session(msgspec.Struct, frozen=True):
    name: str
    turns: list[Turn]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much smaller and faster than the trace. Seconds are the trace's."""

    tokens: int = BLOCK
    time: float = 40.0
    sessions: int = 24
    window_s: float = 1800.0
    """A session's turns are taken until so much idle time has passed."""
    idle_max_s: float = 1125.0
    """Longer pauses are cut to this, which must be longer than every lifetime."""
    prompt_max: int = 6000
    """A session ends before its first scaled prompt that is longer."""
    seed: int = 1


def read_sessions(path: Path, scale: Scale) -> list[Session]:
    """So many sessions of the file, always the same for a seed. Raises ConfigError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        sessions = [scaled(json.loads(line), scale) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no multi-turn trace: {type(error).__name__}: {error}") from error
    useful = [session for session in sessions if len(session.turns) > 1]
    if not useful:
        raise ConfigError(f"{path} has no session with two turns that fit")
    return random.Random(scale.seed).sample(useful, min(scale.sessions, len(useful)))  # noqa: S311  (a choice)


def scaled(row: dict[str, Any], scale: Scale) -> Session:
    """One line of the file. Entries that stand for a sub-agent's own requests are left out."""
    step = max(1, round(scale.tokens / BLOCK))
    turns: list[Turn] = []
    passed_s, ended_s = 0.0, 0.0
    for request in row["requests"]:
        if "hash_ids" not in request:
            continue
        ids = tuple(request["hash_ids"][step - 1 :: step])
        idle_s = request.get("think_time")
        idle_s = max(0.0, request["t"] - ended_s) if idle_s is None else float(idle_s)
        idle_s = min(idle_s, scale.idle_max_s) if turns else 0.0
        passed_s += idle_s
        ended_s = request["t"] + (request.get("api_time") or 0.0)
        if passed_s > scale.window_s or not 0 < len(ids) <= scale.prompt_max:
            break
        turns.append(Turn(idle_s=idle_s, ids=ids, answer=max(1, round(request["out"] / (step * BLOCK)))))
    return Session(str(row["id"]), turns)


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are equal."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def reusable(turns: Sequence[Turn], at: int, lifetime_s: float | None, block: int = 1) -> int:
    """Tokens of turn `at` whose KV exists already, at best.

    Without a lifetime, in a cache that never forgets any turn; with one, where only the turn before is kept, for so
    long. Whole blocks count, and a partly filled one at the end of what is kept. One token is left to compute.
    """
    turn = turns[at]
    if at == 0 or (lifetime_s is not None and turn.idle_s >= lifetime_s):
        return 0
    candidates = turns[:at] if lifetime_s is None else turns[at - 1 : at]
    return min(max(_kept(before, turn, block) for before in candidates), len(turn.ids) - 1)


def _kept(before: Turn, turn: Turn, block: int) -> int:
    """KV exists for the prompt and for all of the answer but its last token."""
    common, held = in_common(before.ids, turn.ids), len(before.ids) + before.answer - 1
    if common == len(before.ids):
        common = min(held, len(turn.ids))
    return common if common == held else common // block * block


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache could do for all sessions."""

    turns: int
    later: int
    """Turns but the first of each session."""
    prompt_tokens: int
    hits: int
    saved: int


def bound_of(sessions: Iterable[Session], lifetime_s: float | None, block: int = 1) -> Bound:
    """Computed, not measured."""
    turns = later = prompt_tokens = hits = saved = 0
    for session in sessions:
        for at, turn in enumerate(session.turns):
            found = reusable(session.turns, at, lifetime_s, block)
            turns, later, prompt_tokens = turns + 1, later + (at > 0), prompt_tokens + len(turn.ids)
            hits, saved = hits + (found > 0), saved + found
    return Bound(turns=turns, later=later, prompt_tokens=prompt_tokens, hits=hits, saved=saved)


class Script:
    """A session's prompts as token ids. Where a prompt goes on from the one before, it has the engine's answer."""

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self._first = 1000 + number * 1_000_000
        self._tokens: dict[int, int] = {}

    def prompt(self, at: int) -> list[int]:
        return [self._tokens.setdefault(name, self._first + name) for name in self.session.turns[at].ids]

    def answered(self, at: int, tokens: Sequence[int]) -> None:
        """What follows turn `at`'s whole prompt in the next one begins with this answer."""
        if at + 1 == len(self.session.turns):
            return
        ids, after = self.session.turns[at].ids, self.session.turns[at + 1].ids
        if after[: len(ids)] == ids:
            for name, token in zip(after[len(ids) :], tokens, strict=False):
                self._tokens.setdefault(name, token)


def made_up(sessions: int, turns: int, seed: int = 1) -> list[dict[str, Any]]:
    """Lines of a trace of this form, made by chance: for tests, and to try the benchmark without the file."""
    chance = random.Random(seed)  # noqa: S311  (reproducible, not secret)
    return [_made_up(f"made-up-{number}", turns, chance) for number in range(sessions)]


def _made_up(name: str, turns: int, chance: random.Random) -> dict[str, Any]:
    ids, t = list(range(chance.randrange(100, 300))), 0.0
    first, requests = len(ids), list[dict[str, Any]]()
    for _ in range(turns):
        think_s = chance.choice([3.0, 5.0, 8.0, 15.0, 60.0, 200.0, 600.0])
        out, api_s = chance.randrange(64, 640), 5.0
        t += think_s
        requests.append(
            {
                "t": t,
                "in": len(ids) * BLOCK,
                "out": out,
                "hash_ids": list(ids),
                "api_time": api_s,
                "think_time": think_s,
            }
        )
        t += api_s
        if chance.random() < 0.1:  # noqa: PLR2004  (now and then a history is shortened)
            ids = ids[: len(ids) // 2]
        more = chance.randrange(12, 30)
        ids, first = ids + list(range(first, first + more)), first + more
    return {"id": name, "block_size": BLOCK, "requests": requests}
