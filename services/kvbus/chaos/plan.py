"""Which faults, upon whom, in which order: a pure function of the seed. Pure.

Faults are dealt into lanes. A lane's faults come one after the other, each when what the one before it hit serves
again; lanes run side by side. So a prefill and a decode may be down together, but never two of either.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from kvbus.chaos.dice import Dice

Kind = Literal["kill", "pause", "cut", "duplicate", "deny", "forge", "fill", "exhaust"]
Lane = Literal["prefill", "decode", "matcher", "reuse", "router", "bus", "clients"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LANES: tuple[Lane, ...] = get_args(Lane)
FAULTS_MAX = 2000

CUT_STAGES = ("half_request", "sent", "routed", "registered", "ordered", "first_byte", "mid_stream", "nearly_done")
"""Where a client leaves: while its request is on the way, then by what the bus says of it, then in its answer."""
DUPLICATE_WAYS = ("at_once", "three_times", "reversed", "old")
DENIALS = (
    ("matcher", "kvbus.v1.transfer.push_ordered."),
    ("prefill", "kvbus.v1.transfer.blocks_ready."),
    ("prefill", "kvbus.v1.transfer.push_done."),
    ("decode", "kvbus.v1.transfer.blocks_registered."),
    ("decode", "kvbus.v1.transfer.transfer_closed."),
    ("decode", "kvbus.v1.reuse.reuse_offered."),
    ("decode", "$KV.kvbus_engines."),
    ("reuse", "kvbus.v1.reuse.reuse_answered."),
    ("router", "kvbus.v1.route.route_decided."),
    ("router", "kvbus.v1.reuse.reuse_asked."),
)
"""Whom a permission is taken from, and for which subjects."""
FILL_WAYS = ("discard_old", "refuse_new")


QUIETER: Mapping[Lane, int] = {"matcher": 4, "reuse": 4, "router": 4, "bus": 2}
"""Lanes whose faults are soon over have longer gaps, so that all lanes end at about the same time."""


class Share(NamedTuple):
    """How many of 200 faults are of this kind upon such a part."""

    kind: Kind
    role: str
    lane: Lane
    of_200: int


SHARES = (
    Share("kill", "prefill", "prefill", 10),
    Share("pause", "prefill", "prefill", 8),
    Share("kill", "decode", "decode", 10),
    Share("pause", "decode", "decode", 8),
    Share("kill", "matcher", "matcher", 9),
    Share("pause", "matcher", "matcher", 7),
    Share("kill", "reuse", "reuse", 9),
    Share("pause", "reuse", "reuse", 6),
    Share("kill", "router", "router", 9),
    Share("pause", "router", "router", 6),
    Share("kill", "nats", "bus", 8),
    Share("pause", "nats", "bus", 6),
    Share("deny", "bus", "bus", 10),
    Share("fill", "stream", "bus", 8),
    Share("cut", "client", "clients", 40),
    Share("duplicate", "messages", "clients", 32),
    Share("forge", "sender", "clients", 6),
    Share("exhaust", "blocks", "clients", 8),
)

PAUSES_S: Mapping[str, tuple[float, float]] = {
    "prefill": (7.0, 12.0),
    "decode": (7.0, 12.0),
    "matcher": (4.0, 7.0),
    "reuse": (2.0, 6.0),
    "router": (2.0, 5.0),
    "nats": (6.5, 9.0),
}
"""Longer than the lease of each: 6 s of an engine's card, which NATS itself keeps as well, 3 s of the matcher."""
DOWN_S = (0.0, 2.0)
"""How long what was killed stays down before it is started again."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `target` is a process, or what else is hit; `way` is how; seconds."""

    number: int
    lane: Lane
    kind: Kind
    target: str
    way: str = ""
    gap_s: float
    """Quiet time of the lane before it."""
    hold_s: float = 0.0


def shares_of(kinds: Collection[str]) -> list[Share]:
    """The shares of these kinds; of every kind when there are none."""
    return [share for share in SHARES if not kinds or share.kind in kinds]


def plan(
    seed: int, faults: int, counts: Mapping[str, int], gap_s: tuple[float, float], kinds: Collection[str] = ()
) -> dict[Lane, list[Fault]]:
    """The schedule. `counts` says how many there are of prefill, decode, matcher, reuse and router."""
    dice, shares = Dice(seed, "plan"), shares_of(kinds)
    lanes: dict[Lane, list[Fault]] = {lane: [] for lane in LANES}
    dealt = [share for share, count in zip(shares, scaled(shares, faults), strict=True) for _ in range(count)]
    dice.shuffle(dealt)
    turns: dict[tuple[Kind, str], int] = {}
    for number, share in enumerate(dealt, 1):
        turn = turns[share.kind, share.role] = turns.get((share.kind, share.role), dice.below(60)) + 1
        lanes[share.lane].append(_fault(dice, share, number, turn, counts, gap_s))
    return lanes


def scaled(shares: Sequence[Share], faults: int) -> list[int]:
    """How many of each share make `faults` in all: at least one each, the rest by largest remainder."""
    assert len(shares) <= faults <= FAULTS_MAX, faults
    whole = sum(share.of_200 for share in shares)
    spare = faults - len(shares)
    exact = [spare * share.of_200 / whole for share in shares]
    numbers = [1 + int(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda at: int(exact[at]) - exact[at])
    for at in by_rest[: faults - sum(numbers)]:
        numbers[at] += 1
    return numbers


def _fault(
    dice: Dice, share: Share, number: int, turn: int, counts: Mapping[str, int], gap_s: tuple[float, float]
) -> Fault:
    """`turn` counts the faults of a share, so that ways and targets take turns."""
    target, way, hold_s = share.role, "", 0.0
    match share.kind:
        case "kill" | "pause":
            target = _member(share.role, turn, counts)
            hold_s = dice.between(*(DOWN_S if share.kind == "kill" else PAUSES_S[share.role]))
        case "cut":
            way = CUT_STAGES[turn % len(CUT_STAGES)]
        case "duplicate":
            way = DUPLICATE_WAYS[turn % len(DUPLICATE_WAYS)]
        case "deny":
            role, way = DENIALS[turn % len(DENIALS)]
            target, hold_s = _member(role, dice.below(60), counts), dice.between(1.5, 4.0)
        case "fill":
            way, hold_s = FILL_WAYS[turn % len(FILL_WAYS)], dice.between(2.0, 5.0)
        case "forge":
            target = _member(("prefill", "decode")[turn % 2], turn // 2, counts)
        case "exhaust":
            hold_s = 0.0
    gap = dice.between(*gap_s) * QUIETER.get(share.lane, 1)
    return Fault(
        number=number,
        lane=share.lane,
        kind=share.kind,
        target=target,
        way=way,
        gap_s=round(gap, 2),
        hold_s=round(hold_s, 2),
    )


def _member(role: str, turn: int, counts: Mapping[str, int]) -> str:
    return role if role == "nats" else f"{role}-{turn % counts[role]}"
