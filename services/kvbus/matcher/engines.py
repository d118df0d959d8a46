"""The engines that a matcher knows: who lives, and which incarnations are gone for good."""

from kvbus.matcher.checks import Refusal
from kvbus_schemas import BlocksRegistered, EngineCard

GONE_MAX = 4096
"""Incarnations that are remembered as gone; the oldest is forgotten first."""


class Engines:
    """Live engines by engine_id, one incarnation each, and the incarnations that are known to be over."""

    def __init__(self) -> None:
        self._live: dict[str, EngineCard] = {}
        self._gone: dict[tuple[str, str], None] = {}

    def __len__(self) -> int:
        return len(self._live)

    def seen(self, card: EngineCard) -> str | None:
        """Take a card. Returns the incarnation that it replaces, if it replaces one."""
        before = self._live.get(card.engine_id)
        self._gone.pop((card.engine_id, card.incarnation), None)
        self._live[card.engine_id] = card
        if before is None or before.incarnation == card.incarnation:
            return None
        self._bury(card.engine_id, before.incarnation)
        return before.incarnation

    def lost(self, engine_id: str, incarnation: str) -> bool:
        """Take it that this incarnation is over. False if it is not the one that was known to live."""
        card = self._live.get(engine_id)
        if card is None or card.incarnation != incarnation:
            return False
        del self._live[engine_id]
        self._bury(engine_id, incarnation)
        return True

    def find(self, engine_id: str, incarnation: str) -> EngineCard | None:
        """The live engine of that name and incarnation (any incarnation if it is empty)."""
        card = self._live.get(engine_id)
        return card if card is not None and incarnation in ("", card.incarnation) else None

    def missing(self, registration: BlocksRegistered, *, overdue: bool) -> Refusal | None:
        """Why an engine that the registration names will not come; None while its card may still be on its way."""
        for role, engine_id, incarnation in (
            ("producer", registration.producer_id, registration.producer_incarnation),
            ("consumer", registration.consumer_id, registration.consumer_incarnation),
        ):
            gone = (engine_id, incarnation) in self._gone
            if self.find(engine_id, incarnation) is None and (gone or overdue):
                return self._refusal(role, engine_id, incarnation, gone=gone)
        return None

    def _refusal(self, role: str, engine_id: str, incarnation: str, *, gone: bool) -> Refusal:
        who = f"{role} {engine_id!r}" + (f" of incarnation {incarnation!r}" if incarnation else "")
        live = self._live.get(engine_id)
        now = f"{live.incarnation!r} lives now" if live else "no engine of that name has announced itself"
        if gone:
            return Refusal(f"{role}_gone", f"{who} is gone: {now}")
        return Refusal("incarnation" if live else "engine_unknown", f"{who} is not known: {now}")

    def named(self, engine_id: str) -> EngineCard | None:
        """The live engine of that name, whatever its incarnation."""
        return self._live.get(engine_id)

    def _bury(self, engine_id: str, incarnation: str) -> None:
        self._gone[(engine_id, incarnation)] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
