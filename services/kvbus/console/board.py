"""Who is on the bus: engines by their cards and reports, and every other process by what it says. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kvbus.trace.core import Line
from kvbus_schemas import (
    BlocksUnavailable,
    CancelOrdered,
    EngineCard,
    LoadReported,
    PushOrdered,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
)

ENGINES_MAX = 512
PROCESSES_MAX = 256
OFFERS_MAX = 100_000
GONE_KEPT_S = 600.0
"""An engine that is gone stays on the page for so long."""
SILENT_KEPT_S = 900.0
"""So does a process that says nothing; a standby says nothing by nature."""
_KIND_BY_WORD: dict[type, str] = {
    RouteDecided: "router",
    RequestServed: "router",
    RouteAsked: "router",
    ReuseAsked: "router",
    RouteAnswered: "policy",
    ReuseAnswered: "reuse",
    PushOrdered: "matcher",
    BlocksUnavailable: "matcher",
    CancelOrdered: "router",
    ReuseReleased: "reuse",
}
"""What a process is, by the first that it says; engines are known by their cards and loads."""


@dataclass(slots=True)
class _Engine:
    card: EngineCard | None = None
    load: LoadReported | None = None
    load_at_s: float = 0.0
    gone_at_s: float = 0.0
    offers: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Conversations that it holds: offer ids, and when they end."""


@dataclass(slots=True)
class _Process:
    kind: str
    incarnation: str
    messages: int = 0
    at_s: float = 0.0


class Board:
    """Engines and processes. Times are seconds since 1970 on one clock."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._processes: OrderedDict[str, _Process] = OrderedDict()
        self._offer_count = 0

    def card(self, card: EngineCard) -> None:
        """The engine lives."""
        engine = self._engine(card.engine_id)
        if engine.card is not None and engine.card.incarnation != card.incarnation:
            engine.offers.clear()  # what it held went with the process
        engine.card, engine.gone_at_s = card, 0.0

    def card_gone(self, engine_id: str, now_s: float) -> None:
        """The engine's card is not there any more."""
        engine = self._engines.get(engine_id)
        if engine is not None and not engine.gone_at_s:
            engine.gone_at_s = now_s
            engine.offers.clear()

    def hear(self, line: Line) -> None:
        """Take from a message what it says of its sender."""
        message = line.message
        match message:
            case LoadReported():
                engine = self._engine(message.engine_id)
                if line.at_s >= engine.load_at_s:
                    engine.load, engine.load_at_s = message, line.at_s
            case ReuseOffered():
                self._offered(message, line.at_s)
            case ReuseWithdrawn():
                self._ended(message.engine_id, message.offer_id)
            case ReuseAnswered() if message.grant is not None:
                self._ended(message.grant.holder_id, message.grant.offer_id)
            case _:
                pass
        if not self._is_engine(line.sender):
            self._spoke(line)

    def engines(self, now_s: float) -> list[dict[str, Any]]:
        """One row for each engine: prefill first, then by name."""
        for name in [
            name for name, one in self._engines.items() if one.gone_at_s and one.gone_at_s < now_s - GONE_KEPT_S
        ]:
            del self._engines[name]
        rows = [self._row(name, engine, now_s) for name, engine in self._engines.items()]
        return sorted(rows, key=lambda row: (row["role"] != "prefill", _natural(row["id"])))

    def processes(self, now_s: float) -> list[dict[str, Any]]:
        """Routers, matchers, reuse processes and policies that have spoken."""
        silent = [name for name, one in self._processes.items() if one.at_s < now_s - SILENT_KEPT_S]
        for name in silent:
            del self._processes[name]
        rows = [
            {"id": name, "kind": one.kind, "incarnation": one.incarnation, "messages": one.messages, "at": one.at_s}
            for name, one in self._processes.items()
            if not self._is_engine(name)
        ]
        return sorted(rows, key=lambda row: (row["kind"], _natural(row["id"])))

    def _row(self, name: str, engine: _Engine, now_s: float) -> dict[str, Any]:
        while engine.offers and next(iter(engine.offers.values())) < now_s:
            engine.offers.popitem(last=False)
        card, load = engine.card, engine.load
        state = "gone" if engine.gone_at_s else "draining" if card and card.draining else "alive" if card else "unknown"
        return {
            "id": name,
            "role": card.role if card else "",
            "model": card.model if card else "",
            "incarnation": card.incarnation if card else (load.incarnation if load else ""),
            "state": state,
            "tp": card.tp_size if card else 1,
            "running": load.running if load else 0,
            "waiting": load.waiting if load else 0,
            "free": load.free_blocks if load else 0,
            "total": load.total_blocks if load else (card.num_blocks if card else 0),
            "held_blocks": load.held_blocks if load else 0,
            "held": len(engine.offers),
            "load_at": round(engine.load_at_s, 3),
        }

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines and len(self._engines) >= ENGINES_MAX:
            self._engines.pop(next(iter(self._engines)))
        return self._engines.setdefault(name, _Engine())

    def _is_engine(self, name: str) -> bool:
        """An engine, or a rank of one (`prefill-0-r0`)."""
        base, _, rank = name.rpartition("-r")
        return name in self._engines or (rank.isdecimal() and base in self._engines)

    def _offered(self, offer: ReuseOffered, at_s: float) -> None:
        offers = self._engine(offer.engine_id).offers
        offers[offer.offer_id] = at_s + offer.remaining_s
        if len(offers) > OFFERS_MAX:
            offers.popitem(last=False)

    def _ended(self, engine_id: str, offer_id: str) -> None:
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.offers.pop(offer_id, None)

    def _spoke(self, line: Line) -> None:
        kind = _KIND_BY_WORD.get(type(line.message))
        process = self._processes.get(line.sender)
        if process is None:
            if kind is None:
                return
            process = self._processes[line.sender] = _Process(kind, line.message.incarnation)
            if len(self._processes) > PROCESSES_MAX:
                self._processes.popitem(last=False)
        process.incarnation = line.message.incarnation or process.incarnation
        process.messages += 1
        process.at_s = max(process.at_s, line.at_s)


def _natural(name: str) -> tuple[str, int]:
    """`prefill-2` before `prefill-10`."""
    base = name.rstrip("0123456789")
    return base, int(name[len(base) :][:9] or 0)
