"""Public traces as requests of one form. Pure, but for reading the file.

Mooncake's have one hash id for each 512 tokens of the prompt, equal where prompts are equal up to there; kv-cache-
tester's sessions have one for each 64, of which every eighth is taken. Azure's say only how long the prompts were.
"""

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import blake2b
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from kvbus.errors import ConfigError

BLOCK = 512
"""Tokens of a block here. Engines have smaller ones: a prefix is cut to whole blocks of this."""
FINE_BLOCK = 64
HASH_BYTES = 8
SESSION_STRIDE = 10_000_000
SESSIONS_WITHIN_S = 1800.0
"""Sessions begin evenly spread within so long; their own pauses stay as they are, up to IDLE_MAX_S."""
IDLE_MAX_S = 300.0


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `hashes` are those of its full blocks, each of all tokens up to its end."""

    at_s: float
    tokens: int
    answer: int
    ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    session: str = ""


def read_trace(path: Path) -> list[Ask]:
    """The requests of a file in the order of time. Raises ConfigError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        asks = spread(sorted(_reader(path, text)(text), key=lambda ask: ask.at_s))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace that is known here: {type(error).__name__}: {error}") from error
    if not asks:
        raise ConfigError(f"{path} has no requests")
    return asks


def _reader(path: Path, text: str) -> Callable[[str], Iterable[Ask]]:
    if path.suffix == ".csv":
        return _azure
    first = json.loads(text.partition("\n")[0])
    return _sessions if "requests" in first else _mooncake


def _mooncake(text: str) -> Iterable[Ask]:
    for row in map(json.loads, text.splitlines()):
        tokens, ids = int(row["input_length"]), tuple(row["hash_ids"])
        full = ids[: tokens // BLOCK]
        yield Ask(
            at_s=row["timestamp"] / 1e3, tokens=tokens, answer=max(1, int(row["output_length"])), ids=full,
            hashes=hashes_of(full),
        )  # fmt: skip


def _sessions(text: str) -> Iterable[Ask]:
    chance = random.Random(1)  # noqa: S311  (reproducible)
    for number, row in enumerate(map(json.loads, text.splitlines())):
        start_s, passed_s, last_s = chance.random() * SESSIONS_WITHIN_S, 0.0, 0.0
        for request in row["requests"]:
            if "hash_ids" not in request:
                continue
            passed_s += min(max(0.0, request["t"] - last_s), IDLE_MAX_S)
            last_s = request["t"]
            step = BLOCK // FINE_BLOCK
            ids = tuple(number * SESSION_STRIDE + name for name in request["hash_ids"][step - 1 :: step])
            yield Ask(
                at_s=start_s + passed_s, tokens=int(request["in"]), answer=max(1, int(request["out"])),
                ids=ids[: int(request["in"]) // BLOCK], hashes=hashes_of(ids[: int(request["in"]) // BLOCK]),
                session=str(row["id"]),
            )  # fmt: skip


def _azure(text: str) -> Iterable[Ask]:
    first_s: float | None = None
    for number, row in enumerate(csv.DictReader(io.StringIO(text))):
        moment_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        first_s = moment_s if first_s is None else first_s
        tokens = int(row["ContextTokens"])
        ids = tuple(number * SESSION_STRIDE + at for at in range(tokens // BLOCK))
        yield Ask(
            at_s=moment_s - first_s, tokens=tokens, answer=max(1, int(row["GeneratedTokens"])), ids=ids,
            hashes=hashes_of(ids),
        )  # fmt: skip


def hashes_of(ids: Iterable[int]) -> tuple[bytes, ...]:
    """As an engine's block hashes: each of its id and the hash before it."""
    found: list[bytes] = []
    before = b""
    for name in ids:
        before = blake2b(name.to_bytes(HASH_BYTES, "big"), digest_size=HASH_BYTES, key=before).digest()
        found.append(before)
    return tuple(found)


def spread(asks: list[Ask]) -> list[Ask]:
    """Mooncake's clock ticks every 3 s: what has the same moment comes evenly spread until the next one."""
    groups = [list(group) for _, group in groupby(asks, key=lambda ask: ask.at_s)]
    found = []
    for group, after in zip_longest(groups, groups[1:]):
        gap_s = after[0].at_s - group[0].at_s if after else 0.0
        for number, ask in enumerate(group):
            found.append(msgspec.structs.replace(ask, at_s=ask.at_s + gap_s * number / len(group)))
    return found


def window(asks: list[Ask], count: int, seed: int) -> list[Ask]:
    """`count` requests in a row, from another place for each seed, from time 0 on."""
    spare = max(0, len(asks) - count)
    start = random.Random(seed).randrange(spare + 1)  # noqa: S311  (reproducible)
    chosen = asks[start : start + count]
    return [msgspec.structs.replace(ask, at_s=ask.at_s - chosen[0].at_s) for ask in chosen]


def paced(asks: list[Ask], busy_s: float, load: float, engines: int) -> list[Ask]:
    """Faster or slower, so that `busy_s` of work keep so many engines busy to the share `load`."""
    span_s = busy_s / (engines * load)
    factor = span_s / max(asks[-1].at_s, 1e-9)
    return [msgspec.structs.replace(ask, at_s=ask.at_s * factor) for ask in asks]


def least_work(asks: list[Ask], prefill_s: Callable[[int], float]) -> float:
    """Seconds of prefill if nothing were ever computed twice."""
    seen: set[bytes] = set()
    total_s = 0.0
    for ask in asks:
        hit = 0
        for name in ask.hashes:
            if name not in seen:
                break
            hit += 1
        seen.update(ask.hashes)
        total_s += prefill_s(ask.tokens - hit * BLOCK)
    return total_s


def summary(asks: list[Ask]) -> dict[str, Any]:
    """What is said of a workload beside its figures."""
    return {
        "requests": len(asks),
        "prompt_tokens_mean": round(sum(ask.tokens for ask in asks) / len(asks)),
        "answer_tokens_mean": round(sum(ask.answer for ask in asks) / len(asks)),
    }
