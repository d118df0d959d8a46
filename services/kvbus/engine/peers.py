"""Which engines live, and since when one is silent. Pure: fed by the card watch, asked by the cores."""

from kvbus_schemas import EngineCard

PRESENCE_LEASE_S = 6.0
"""A card that is not renewed for this long is gone."""
PRESENCE_RENEW_S = 2.0
WRITE_MAX_S = 5.0
"""The longest a WRITE may take. After it the producer aborts the WRITE and reports PushFailed."""
FENCE_S = WRITE_MAX_S + 1.0
"""How long after a card is gone its engine's last WRITE may still land (with a margin for clock drift)."""


GONE_MAX = 1024
"""Incarnations whose end is remembered; the oldest is forgotten first."""


class Peers:
    """Engines by (engine_id, incarnation); the newest incarnation of an engine_id is its live one."""

    def __init__(self, fence_s: float = FENCE_S) -> None:
        self.fence_s = fence_s
        self._live: dict[str, EngineCard] = {}
        self._seen_s: dict[str, float] = {}
        self._gone: dict[tuple[str, str], float] = {}

    def seen(self, card: EngineCard, now_s: float) -> EngineCard | None:
        """A card was put. Returns the card of an incarnation that it replaces, which is thereby gone."""
        before = self._live.get(card.engine_id)
        self._live[card.engine_id] = card
        self._seen_s[card.engine_id] = now_s
        self._gone.pop((card.engine_id, card.incarnation), None)
        if before is None or before.incarnation == card.incarnation:
            return None
        self._gone.setdefault((before.engine_id, before.incarnation), now_s)
        return before

    def gone(self, engine_id: str, now_s: float) -> EngineCard | None:
        """A card was deleted or has expired. Returns it."""
        card = self._live.pop(engine_id, None)
        if card is not None:
            self._gone.setdefault((engine_id, card.incarnation), now_s)
            while len(self._gone) > GONE_MAX:
                del self._gone[next(iter(self._gone))]
        return card

    def silent(self, now_s: float, silent_s: float = 3 * PRESENCE_LEASE_S) -> list[str]:
        """Engines whose card is still here but was not renewed for `silent_s`: their end was missed."""
        return [engine_id for engine_id in self._live if now_s - self._seen_s[engine_id] >= silent_s]

    def card(self, engine_id: str, incarnation: str = "") -> EngineCard | None:
        """The live card, if it is of that incarnation (any, when empty)."""
        card = self._live.get(engine_id)
        return card if card is not None and incarnation in ("", card.incarnation) else None

    def cards(self) -> list[EngineCard]:
        return list(self._live.values())

    def ranks_of(self, engine_id: str) -> int:
        """Tensor parallel size of a live engine; 1 when it is not known."""
        card = self._live.get(engine_id)
        return card.tp_size if card else 1

    def fenced(self, engine_id: str, incarnation: str, now_s: float) -> bool:
        """Whether nothing of that incarnation can write any more: it is gone, and the longest WRITE has passed."""
        gone_s = self._gone.get((engine_id, incarnation))
        return gone_s is not None and now_s >= gone_s + self.fence_s
