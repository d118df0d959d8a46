"""What a campaign came to: how each request ended, how long each fault was felt, and what must be zero. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from kvbus.chaos.plan import Fault

Verdict = Literal["right", "error", "wrong", "hang"]

START_WAIT_S = 15.0
"""A process that starts waits for NATS for 5 s, and for the trace to take something in for 10 s; then it ends with an
error that says so, and whoever supervises it starts it again. Engines go on trying, so none of them may end."""
GRACE_S = 15.0
"""After a fault whose recovery has not been seen yet: a prefill's end is felt for 12 s by those that wait for it."""
BROKEN = ("connection_refused", "connection_broken")
SERVER_FAULT, TOO_MANY = 500, 429
UNCLEAR = ("no_error_json", "no_answer_json", "stream_cut_short")


class Outcome(msgspec.Struct, kw_only=True):
    """How one request ended. Times in seconds of one monotonic clock."""

    request_id: str
    script: int
    turn: int
    router: str
    sent_s: float
    ended_s: float
    verdict: Verdict
    status: int = 200
    code: str = ""
    detail: str = ""
    transfer_id: str = ""
    mode: str = ""
    reuse: str = ""
    prefill_id: str = ""
    decode_id: str = ""
    closed: str = ""
    """How its transfer ended."""


class Happened(msgspec.Struct, kw_only=True):
    """A fault that was carried out. `ended_s` is when what it hit may serve again: started, continued, put back."""

    fault: Fault
    began_s: float
    ended_s: float = 0.0
    recovered_s: float = 0.0
    shown_by: str = ""
    """The request whose answer showed that it is over."""
    note: str = ""

    @property
    def took_s(self) -> float | None:
        """From the fault's end to the end of the first right answer through that part that was asked for after it."""
        return self.recovered_s - self.ended_s if self.recovered_s else None


class Crash(msgspec.Struct, frozen=True):
    """A process that ended although nobody had ended it."""

    name: str
    at_s: float
    exit_code: int
    log: str


def excused(crash: Crash, happened: Iterable[Happened]) -> bool:
    """Whether it was a process that found no NATS, or a full trace, at its start."""
    away = [one for one in happened if one.fault.target in ("nats", "stream") and one.began_s <= crash.at_s]
    is_engine = crash.name.startswith(("prefill", "decode"))
    return not is_engine and any(not one.ended_s or crash.at_s <= one.ended_s + START_WAIT_S for one in away)


def serves(target: str, outcome: Outcome) -> bool:
    """Whether a right answer shows that this part does its work."""
    role, handed_over = target.split("-", 1)[0], outcome.closed == "completed"
    match role:
        case "prefill":
            return handed_over and outcome.prefill_id == target
        case "decode":
            return handed_over and outcome.decode_id == target
        case "reuse":
            return outcome.reuse.startswith("hit")
        case "router":
            return outcome.router == target
        case "matcher" | "nats" | "stream" | "blocks":
            return handed_over
        case _:
            return True


def first_right(happened: Happened, outcomes: Iterable[Outcome]) -> Outcome | None:
    """The right answer through that part that ended first, of those that were asked for after the fault's end."""
    found = [
        outcome
        for outcome in outcomes
        if outcome.verdict == "right"
        and outcome.sent_s >= happened.ended_s > 0
        and serves(happened.fault.target, outcome)
    ]
    return min(found, key=lambda outcome: outcome.ended_s, default=None)


def clear(outcome: Outcome, felt: Iterable[Happened]) -> bool:
    """Whether an error says what it is and a fault explains it: JSON with 5xx or 429, in a stream an event with it; a
    connection that broke is clear only when it was to a router that was killed."""
    near = [happened for happened in felt if _near(happened, outcome)]
    if outcome.code in BROKEN:
        return any(happened.fault.kind == "kill" and happened.fault.target == outcome.router for happened in near)
    if outcome.code in UNCLEAR or not outcome.code:
        return False
    serious = outcome.status >= SERVER_FAULT or outcome.status == TOO_MANY or outcome.code.startswith("stream_")
    return serious and bool(near)


def _near(happened: Happened, outcome: Outcome) -> bool:
    until_s = happened.recovered_s or (happened.ended_s + GRACE_S if happened.ended_s else outcome.ended_s)
    return happened.began_s <= outcome.ended_s and outcome.sent_s <= max(until_s, happened.ended_s + 1.0)


class Score(msgspec.Struct, kw_only=True):
    """All that is counted."""

    requests: int
    verdicts: dict[str, int]
    errors: dict[str, int]
    """By status and code."""
    modes: dict[str, int]
    closed: dict[str, int]
    reuse_hits: int
    faults: int
    faults_by_kind: dict[str, int]
    recoveries: dict[str, list[float]]
    """Seconds, by kind and role."""
    unclear: list[str]
    never_recovered: list[str]
    crashed: list[str]
    starts_refused: int
    """Processes that ended because they were started while NATS was away or its trace full."""
    blocks_lost: dict[str, int]
    forgeries_heard: int
    dead_letters: int

    def broken(self) -> list[str]:
        """What should be zero and is not."""
        must_be_zero = {
            "wrong tokens": self.verdicts.get("wrong", 0),
            "hangs past the deadline": self.verdicts.get("hang", 0),
            "errors that are not clear": len(self.unclear),
            "processes that ended by themselves": len(self.crashed),
            "blocks lost": sum(self.blocks_lost.values()),
            "parts that never served again": len(self.never_recovered),
            "forged messages that were let through": self.forgeries_heard,
        }
        return [f"{what}: {count}" for what, count in must_be_zero.items() if count]


def label(fault: Fault) -> str:
    """Kind and role, as reports name them."""
    return f"{fault.kind} {fault.target.split('-')[0]}"


def score(
    outcomes: list[Outcome],
    happened: list[Happened],
    crashes: list[Crash],
    blocks_lost: dict[str, int],
    *,
    forgeries_heard: int,
    dead_letters: int,
) -> Score:
    """Add it all up."""
    recoveries: dict[str, list[float]] = {}
    for one in happened:
        if one.took_s is not None:
            recoveries.setdefault(_by_role(one.fault), []).append(one.took_s)
    errors = [outcome for outcome in outcomes if outcome.verdict == "error"]
    return Score(
        requests=len(outcomes),
        verdicts=dict(Counter(outcome.verdict for outcome in outcomes)),
        errors=dict(Counter(f"{outcome.status} {outcome.code}".removeprefix("0 ") for outcome in errors).most_common()),
        modes=dict(Counter(outcome.mode for outcome in outcomes if outcome.verdict == "right")),
        closed=dict(Counter(outcome.closed for outcome in outcomes if outcome.closed)),
        reuse_hits=sum(outcome.reuse.startswith("hit") for outcome in outcomes),
        faults=len(happened),
        faults_by_kind=dict(Counter(_by_role(one.fault) for one in happened)),
        recoveries=recoveries,
        unclear=[outcome.request_id for outcome in errors if not clear(outcome, happened)],
        never_recovered=[f"#{one.fault.number} {label(one.fault)}" for one in happened if one.took_s is None],
        crashed=[f"{crash.name} (code {crash.exit_code})" for crash in crashes if not excused(crash, happened)],
        starts_refused=sum(excused(crash, happened) for crash in crashes),
        blocks_lost=blocks_lost,
        forgeries_heard=forgeries_heard,
        dead_letters=dead_letters,
    )


def _by_role(fault: Fault) -> str:
    """Denials of any part are one row of the table."""
    return fault.kind if fault.kind in ("deny", "forge", "fill", "exhaust", "cut", "duplicate") else label(fault)
