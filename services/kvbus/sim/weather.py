"""What goes wrong in a run. Each run draws a few kinds of fault, so that rare pairs of them meet (swarm testing)."""

from dataclasses import dataclass, field
from random import Random

FAULTS = (
    "loss", "duplicate", "delay", "partition", "nats", "nixl", "write", "handshake", "crash", "pause", "drift",
    "memory", "leave", "matcher", "legs", "reuse",
)  # fmt: skip
"""Kinds of fault, as `--faults` names them. Of reuse processes there are some in the worlds with conversations only."""

DRIFT_MAX = 0.01
"""Clocks run at most this share too fast or too slow: the bound under which the fences hold."""
PAUSE_MAX_S = 20.0
CUT_MAX_S = 12.0


@dataclass(slots=True)
class Weather:
    """The faults of one run: chances per message or WRITE, and the kinds that come as events."""

    kinds: frozenset[str] = frozenset()
    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_max_s: float = 0.0
    write_slow: float = 0.0
    write_fail: float = 0.0
    write_hang: float = 0.0
    handshake_slow: float = 0.0
    handshake_fail: float = 0.0
    drift: float = 0.0
    leave: float = 0.0
    twice: float = 0.0
    """Chance that a leg is sent twice with the same ticket."""
    shocks: list[str] = field(default_factory=list)
    """Kinds of the events to come: crash, pause, partition, nats, nixl, matcher, reuse."""


def draw(rng: Random, allowed: frozenset[str], *, reuse: bool) -> Weather:
    """The weather of one run, out of the allowed kinds of fault; `reuse`: there are reuse processes."""
    share = rng.choice((0.15, 0.3, 0.6))
    possible = FAULTS if reuse else FAULTS[:-1]
    kinds = frozenset(kind for kind in possible if rng.random() < share and kind in allowed)
    weather = Weather(kinds=kinds)
    if "loss" in kinds:
        weather.loss = rng.choice((0.02, 0.1, 0.4))
    if "duplicate" in kinds:
        weather.duplicate = rng.choice((0.1, 0.5))
    if "delay" in kinds:
        weather.delay, weather.delay_max_s = rng.choice((0.05, 0.3)), rng.choice((0.1, 1.0, 4.0))
    if "write" in kinds:
        weather.write_slow = rng.choice((0.1, 0.5))
        weather.write_fail = rng.choice((0.0, 0.1, 0.4))
        weather.write_hang = rng.choice((0.0, 0.1, 0.3))
    if "handshake" in kinds:
        weather.handshake_slow, weather.handshake_fail = rng.choice((0.2, 0.7)), rng.choice((0.0, 0.3))
    if "drift" in kinds:
        weather.drift = DRIFT_MAX
    if "leave" in kinds:
        weather.leave = rng.choice((0.2, 0.6))
    if "legs" in kinds:
        weather.twice = 0.3
    shocking = [kind for kind in ("crash", "pause", "partition", "nats", "nixl", "matcher", "reuse") if kind in kinds]
    for kind in shocking:
        weather.shocks += [kind] * rng.choice((1, 1, 2))
    return weather
