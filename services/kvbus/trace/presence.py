"""Which engines lived while a trace was recorded: cards are kept in a bucket, not in the stream. Pure.

An export puts lines of presence among those of the stream, marked `derived`: a card before the first word of its
incarnation, a line without a message where an engine fell silent. A card that is in the bucket is written as it is; of
an incarnation that is over only the name is known, and what else its card said is taken from the present card of that
engine, or of another one whose blocks mean the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvbus.trace.core import Line
from kvbus_schemas import EVERYONE, AnyMessage, BlocksRegistered, EngineCard, LoadReported, subjects

CARD_TTL_S = 6.0
"""An engine's card is gone so long after its last renewal."""
SILENT_S = 8.0
"""A live engine reports its load every 2 s, and its card outlives it by 6 s."""


class Presence(NamedTuple):
    """From now on this engine is there, or, without a card, is not. `seq` is that of the line it stands before."""

    seq: int
    at_s: float
    engine_id: str
    card: EngineCard | None

    @property
    def subject(self) -> str:
        """As if the engine had published its card."""
        kind = EngineCard
        name = subjects.token(self.engine_id)
        return f"{subjects.ROOT}.{kind.PLANE}.{subjects.event_of(kind)}.{name}.{EVERYONE}.{name}"


@dataclass(slots=True)
class _Life:
    """What one incarnation of an engine has said."""

    engine_id: str
    incarnation: str
    first: Line
    last: Line
    compat_hash: str = ""


def presence_of(lines: Iterable[Line], cards: Iterable[EngineCard]) -> list[Presence]:
    """The presence of engines over these lines, oldest first. `cards` are those in the bucket at the end of them.

    The end of an engine that fell silent is exact to about 2 s. An engine that no present card resembles is left out.
    """
    ordered = sorted(lines, key=lambda line: line.seq)
    present = {card.engine_id: card for card in cards}
    if not ordered or not present:
        return [Presence(0, 0.0, card.engine_id, card) for card in present.values()]
    lives = _lives(ordered)
    spoken = {(life.engine_id, life.incarnation) for life in lives}
    first, end_s = ordered[0], ordered[-1].at_s
    found = [
        Presence(first.seq, first.at_s, card.engine_id, card)
        for card in present.values()
        if (card.engine_id, card.incarnation) not in spoken
    ]
    for life in lives:
        card = _card_of(life, present)
        if card is None:
            continue
        found.append(Presence(life.first.seq, life.first.at_s, life.engine_id, card))
        gone_s = life.last.at_s + CARD_TTL_S
        is_present = life.engine_id in present and present[life.engine_id].incarnation == life.incarnation
        if not is_present and life.last.at_s + SILENT_S < end_s and not _replaced(life, lives, gone_s):
            seq = next(line.seq for line in ordered if line.at_s >= gone_s)
            found.append(Presence(seq, gone_s, life.engine_id, None))
    return sorted(found, key=lambda one: (one.seq, one.at_s))


def _lives(lines: list[Line]) -> list[_Life]:
    """Every incarnation that reported its load, from its first word to its last."""
    engines = {line.message.engine_id for line in lines if isinstance(line.message, LoadReported)}
    lives: dict[tuple[str, str], _Life] = {}
    for line in lines:
        name, incarnation = line.sender, line.message.incarnation
        if name not in engines or not incarnation:
            continue
        life = lives.setdefault((name, incarnation), _Life(name, incarnation, line, line))
        life.last = line
        if isinstance(line.message, BlocksRegistered):
            life.compat_hash = line.message.compat_hash
    return list(lives.values())


def _card_of(life: _Life, present: dict[str, EngineCard]) -> EngineCard | None:
    own = present.get(life.engine_id)
    if own is not None and own.incarnation == life.incarnation:
        return own
    fitting = [card for card in present.values() if life.compat_hash in ("", card.compat_hash)]
    like = own or next((card for card in fitting if _kind(card.engine_id) == _kind(life.engine_id)), None)
    like = like or next(iter(fitting), None)
    if like is None:
        return None
    return msgspec.structs.replace(like, engine_id=life.engine_id, source=life.engine_id, incarnation=life.incarnation)


def _kind(engine_id: str) -> str:
    return engine_id.rstrip("0123456789").rstrip("-_")


def _replaced(life: _Life, lives: list[_Life], gone_s: float) -> bool:
    """Another incarnation of the engine spoke before this one's card would have gone."""
    return any(
        other.engine_id == life.engine_id and life.last.seq < other.first.seq and other.first.at_s <= gone_s
        for other in lives
    )


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an export."""

    seq: int
    unix_s: float
    subject: str
    message: AnyMessage | None = None
    """None: the engine that the subject names is gone."""
    derived: bool = False
    """Not in the stream: an engine's presence."""
