"""Questions to routers on the bus ("guests"), and what becomes of each answer. Pure: facts in, outcomes out.

Theory of operation. A question has an id of its own. It goes to one guest, which decides, or to shadows, whose answers
are only compared with what was chosen. An id is guessed by nobody and is good for one answer.

| what comes, to a question that          | is open                 | is over                  |
|-----------------------------------------|-------------------------|--------------------------|
| an answer of the guest that was asked   | used, or what is wrong  | late, once; then second  |
| bytes of that guest that are no answer  | undecodable             | stray                    |
| an answer of somebody else              | stranger                | stranger                 |
| the deadline                            | no_answer               | (cannot be)              |
| an answer to a question of nobody here  |                         | stray                    |

A question ends with the first of these that its column "is open" names, except a stranger's, which changes nothing.
"""

from collections import OrderedDict, defaultdict
from typing import Literal

import msgspec

from kvbus.router.answers import choice_of
from kvbus.router.breaker import Breaker
from kvbus.router.offered import Offered
from kvbus.router.policies import RouteChoice
from kvbus_schemas import Mode, RouteAnswered

ASKS_OPEN_MAX = 1024
SHADOWS_OPEN_MAX = 2048
SHADOW_NAMES_MAX = 64
"""Routers whose answers to one question are compared."""
PAST_MAX = 4096
"""Questions that are remembered once they are over, to tell what is late from what is nobody's."""
NAMES_MAX = 64
"""Routers that are told apart in metrics; the others are `other`."""
OTHER = "other"

Outcome = Literal[
    "used", "no_answer", "undecodable", "unknown_engine", "wrong", "unasked", "resting", "gone",
    "late", "second", "stranger", "stray", "agreed", "differed",
]  # fmt: skip
FAILURES: frozenset[Outcome] = frozenset({"no_answer", "undecodable", "unknown_engine", "wrong"})
"""What lets a guest rest when it happens again and again."""


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome, with whose it is. With `settles` the request that waits goes on: by `choice` where there is one."""

    guest: str
    outcome: Outcome
    why: str = ""
    ask_id: str = ""
    settles: bool = False
    shadow: bool = False
    choice: RouteChoice | None = None
    took_s: float = 0.0
    turned: Literal["", "rests", "back"] = ""
    """The guest begins to rest, or is back."""


class _Ask(msgspec.Struct, frozen=True):
    guest: str
    offered: Offered
    at_s: float


class _Shadowed(msgspec.Struct, frozen=True):
    offered: Offered
    chosen: tuple[Mode, str, str]
    to: frozenset[str]
    """Empty: whoever listens."""
    answered: set[str]


class Asks:
    """The questions of one router."""

    def __init__(self) -> None:
        self._open: dict[str, _Ask] = {}
        self._shadows: OrderedDict[str, _Shadowed] = OrderedDict()
        self._past: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """Whose question it was, and whether it has been answered."""
        self._breakers: dict[str, Breaker] = defaultdict(Breaker)
        self._names: set[str] = set()

    @property
    def resting(self) -> dict[str, bool]:
        """Of each guest that was asked, whether it rests."""
        return {guest: breaker.resting for guest, breaker in self._breakers.items()}

    def open(self, ask_id: str, guest: str, offered: Offered, now_s: float) -> Heard | None:
        """A request is about to ask `guest` and to wait. Else why it must not."""
        if len(self._open) >= ASKS_OPEN_MAX:
            return self._heard(guest, "unasked", f"{ASKS_OPEN_MAX} questions are open")
        breaker = self._breakers[guest]
        if not breaker.admits(now_s):
            return self._heard(guest, "resting", f"it rests after {breaker.failures} failures in a row")
        self._open[ask_id] = _Ask(guest, offered, now_s)
        return None

    def shadow(self, ask_id: str, to: frozenset[str], offered: Offered, chosen: tuple[Mode, str, str]) -> None:
        """Shadows are asked what has been answered with `chosen` already."""
        self._shadows[ask_id] = _Shadowed(offered, chosen, to, set())
        if len(self._shadows) > SHADOWS_OPEN_MAX:
            self._shadows.popitem(last=False)

    def answered(self, answer: RouteAnswered, now_s: float) -> Heard:
        """An answer has come in."""
        ask_id, source = answer.ask_id, answer.source
        if ask_id in self._shadows:
            return self._shadowed(self._shadows[ask_id], answer)
        ask = self._open.get(ask_id)
        if ask is None:
            return self._afterwards(ask_id, source)
        if source != ask.guest:
            return self._heard(source, "stranger", f"it was {ask.guest} that was asked")
        fault = ask.offered.fault(answer.mode, answer.prefill_id, answer.decode_id)
        if fault is not None:
            return self._failed(ask_id, fault.kind, f"answered wrongly: {fault.why}", now_s)
        self._end(ask_id, answered=True)
        return Heard(
            guest=ask.guest,
            outcome="used",
            ask_id=ask_id,
            settles=True,
            choice=choice_of(answer, ask.offered),
            took_s=now_s - ask.at_s,
            turned="back" if self._breakers[ask.guest].worked() else "",
        )

    def undecodable(self, ask_id: str, source: str, now_s: float) -> Heard:
        """Bytes have come in that are no answer, on the subject of one."""
        ask = self._open.get(ask_id)
        if ask is not None and source == ask.guest:
            return self._failed(ask_id, "undecodable", "answered with bytes that are no RouteAnswered", now_s)
        shadowed = self._shadows.get(ask_id)
        if shadowed is not None and self._may_shadow(shadowed, source):
            return self._heard(source, "undecodable", shadow=True)
        return self._heard(source, "stray" if ask is None else "stranger")

    def expired(self, ask_id: str, deadline_ms: float, now_s: float) -> Heard | None:
        """The deadline of a question has passed. None: it was over already."""
        if ask_id not in self._open:
            return None
        return self._failed(ask_id, "no_answer", f"no answer within {deadline_ms:g} ms", now_s)

    def unsent(self, ask_id: str, why: str) -> Heard:
        """The question could not be sent: no fault of the guest."""
        guest = self._open[ask_id].guest
        self.withdraw(ask_id)
        return self._heard(guest, "unasked", why)

    def withdraw(self, ask_id: str) -> None:
        """Nobody waits for the answer any more. A no-op for what is over."""
        ask = self._open.get(ask_id)
        if ask is not None:
            self._breakers[ask.guest].undecided()
            self._end(ask_id, answered=False)

    def label(self, name: str) -> str:
        """The name under which a router is counted: names of strangers must not fill the metrics."""
        if name in self._names:
            return name
        if not name or len(self._names) >= NAMES_MAX:
            return OTHER
        self._names.add(name)
        return name

    def _failed(self, ask_id: str, outcome: Outcome, why: str, now_s: float) -> Heard:
        guest = self._open[ask_id].guest
        self._end(ask_id, answered=outcome != "no_answer")
        rests = self._breakers[guest].failed(now_s)
        return Heard(
            guest=guest, outcome=outcome, why=why, ask_id=ask_id, settles=True, turned="rests" if rests else ""
        )

    def _shadowed(self, asked: _Shadowed, answer: RouteAnswered) -> Heard:
        source = answer.source
        if source in asked.answered:
            return self._heard(source, "second", shadow=True)
        if not self._may_shadow(asked, source):
            return self._heard(source, "stranger", "it was not asked")
        asked.answered.add(source)
        fault = asked.offered.fault(answer.mode, answer.prefill_id, answer.decode_id)
        if fault is not None:
            return self._heard(source, fault.kind, fault.why, shadow=True)
        agrees = (answer.mode, answer.prefill_id, answer.decode_id) == asked.chosen
        return self._heard(source, "agreed" if agrees else "differed", shadow=True)

    def _may_shadow(self, asked: _Shadowed, source: str) -> bool:
        return bool(source) and (source in asked.to if asked.to else len(asked.answered) < SHADOW_NAMES_MAX)

    def _afterwards(self, ask_id: str, source: str) -> Heard:
        guest, answered = self._past.get(ask_id, ("", False))
        if not guest:
            return self._heard(source, "stray")
        if source != guest:
            return self._heard(source, "stranger", f"it was {guest} that was asked")
        self._past[ask_id] = (guest, True)
        return self._heard(source, "second" if answered else "late")

    def _end(self, ask_id: str, *, answered: bool) -> None:
        self._past[ask_id] = (self._open.pop(ask_id).guest, answered)
        if len(self._past) > PAST_MAX:
            self._past.popitem(last=False)

    def _heard(self, guest: str, outcome: Outcome, why: str = "", *, shadow: bool = False) -> Heard:
        return Heard(guest=self.label(guest), outcome=outcome, why=why, shadow=shadow)
