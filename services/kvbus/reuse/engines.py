"""Which engines live, and in which incarnation: whether an offer's holder can still be asked for it. Pure."""

from typing import Literal

from kvbus.presence import CARD_TTL_S, Cards
from kvbus_schemas import EngineCard

Standing = Literal["live", "unknown", "gone"]


class Engines:
    """Engines by their cards. Times are seconds of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._cards = Cards()
        self._live: dict[str, str] = {}
        self._patient_until_s = now_s + CARD_TTL_S

    def __len__(self) -> int:
        return len(self._live)

    def reconnected(self, now_s: float) -> None:
        """The bucket of cards may have been lost: engines have CARD_TTL_S to renew."""
        self._patient_until_s = now_s + CARD_TTL_S
        self._cards.reconnected(now_s)

    def seen(self, card: EngineCard) -> None:
        """The engine lives; of its older incarnations nothing binds it."""
        self._cards.seen(card)
        self._live[card.engine_id] = card.incarnation

    def vanished(self, engine_id: str, now_s: float) -> None:
        """The engine's card is not there (any more)."""
        self._cards.vanished(engine_id, now_s)

    def standing(self, engine_id: str, incarnation: str, now_s: float) -> Standing:
        """`unknown` is an engine whose card may still be on its way."""
        for gone_id, _ in self._cards.gone(now_s):
            del self._live[gone_id]
        live = self._live.get(engine_id)
        if live is None:
            return "unknown" if now_s < self._patient_until_s else "gone"
        return "live" if live == incarnation else "gone"
