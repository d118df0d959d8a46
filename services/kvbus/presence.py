"""Engines by their cards: a card that vanishes with a restarting nats-server has not vanished yet."""

from kvbus_schemas import EngineCard

CARD_TTL_S = 6.0
"""A live engine has renewed its card within this time."""


class Cards:
    """The cards of the bucket `kvbus_engines`. The bucket is in memory, so that a restarted server has none; for
    CARD_TTL_S after a reconnect, engines have the time to come back."""

    def __init__(self) -> None:
        self._incarnations: dict[str, str] = {}
        self._vanished: dict[str, float] = {}
        self._patient_until_s = 0.0

    def reconnected(self, now_s: float) -> None:
        """From now on engines have CARD_TTL_S to renew."""
        self._patient_until_s = now_s + CARD_TTL_S

    def seen(self, card: EngineCard) -> None:
        """The engine lives."""
        self._incarnations[card.engine_id] = card.incarnation
        self._vanished.pop(card.engine_id, None)

    def vanished(self, engine_id: str, now_s: float) -> None:
        """The engine's card is not there (any more)."""
        if engine_id in self._incarnations:
            self._vanished.setdefault(engine_id, max(now_s, self._patient_until_s))

    def gone(self, now_s: float) -> list[tuple[str, str]]:
        """Engines, with their incarnations, that are gone by now; each is named once."""
        due = [engine_id for engine_id, at_s in self._vanished.items() if at_s <= now_s]
        for engine_id in due:
            del self._vanished[engine_id]
        return [(engine_id, self._incarnations.pop(engine_id)) for engine_id in due]
