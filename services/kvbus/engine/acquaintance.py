"""Which peers a rank has shaken hands with: as soon as their cards are seen, outside any transfer."""

import time
from collections.abc import Callable
from typing import Protocol

import structlog

from kvbus_schemas import EngineCard

log = structlog.get_logger()

HANDSHAKE_AGAIN_S = 10.0
"""Pause before a handshake that failed is tried again."""
REMEMBERED_MAX = 1024


class Connecting(Protocol):
    """What is needed of the data plane."""

    def connect(self, card: EngineCard, done: Callable[[str], None]) -> None: ...

    def connected(self, engine_id: str, incarnation: str) -> bool: ...

    def disconnect(self, engine_id: str, incarnation: str) -> None: ...


class Acquaintance:
    """The peers of one rank. All calls come from the rank's thread; `met` is called from any."""

    def __init__(self, plane: Connecting, met: Callable[[EngineCard, str], None]) -> None:
        self._plane = plane
        self._met = met
        self._cards: dict[str, EngineCard] = {}
        self._connecting: set[str] = set()
        self._refused_s: dict[str, float] = {}

    def replaced_by(self, card: EngineCard) -> EngineCard | None:
        """Take a card. Returns the one of another incarnation that it replaces."""
        before = self._cards.get(card.engine_id)
        self._cards[card.engine_id] = card
        return before if before is not None and before.incarnation != card.incarnation else None

    def meet(self, card: EngineCard) -> bool:
        """Begin a handshake unless there is or was one; True when the peer is connected, or about to be."""
        key = _key(card)
        if time.monotonic() - self._refused_s.get(key, -HANDSHAKE_AGAIN_S) < HANDSHAKE_AGAIN_S:
            return False
        if key in self._connecting or self._plane.connected(card.engine_id, card.incarnation):
            return True
        self._connecting.add(key)
        since_s = time.monotonic()
        self._plane.connect(card, lambda error: self._done(card, error, since_s))
        return False

    def ended(self, card: EngineCard, error: str) -> None:
        """The handshake is over; a failed one is tried again after a pause."""
        self._connecting.discard(_key(card))
        self._refused_s.pop(_key(card), None)
        if error:
            self._refused_s[_key(card)] = time.monotonic()
            while len(self._refused_s) > REMEMBERED_MAX:
                del self._refused_s[next(iter(self._refused_s))]

    def gone(self, engine_id: str) -> EngineCard | None:
        """The peer's card is gone. Returns it."""
        return self._cards.pop(engine_id, None)

    def forget(self, card: EngineCard) -> None:
        """Give up the connection to this incarnation."""
        self._connecting.discard(_key(card))
        self._plane.disconnect(card.engine_id, card.incarnation)

    def _done(self, card: EngineCard, error: str, since_s: float) -> None:
        took_s = round(time.monotonic() - since_s, 3)
        if error:
            log.error("handshake_failed", peer=card.engine_id, error=error, took_s=took_s)
        else:
            log.info("handshake_done", peer=card.engine_id, took_s=took_s)
        self._met(card, error)


def _key(card: EngineCard) -> str:
    return f"{card.engine_id}.{card.incarnation}"
