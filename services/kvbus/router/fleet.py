"""The engines that a router knows: cards and loads in, candidates out. Pure; times are the caller's monotonic clock."""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from kvbus.router.problems import BadRequestError
from kvbus_schemas import EngineCard, EngineView, LoadReported, Role

REST_S = 2.0
"""An engine that failed a request is passed over for so long, in seconds, where there is another one."""
RETURN_GRACE_S = 8.0
"""After NATS came back, engines have so long to renew their cards before a missing card counts as a dead engine."""


CACHE = "cache"
"""Capability of an engine that says what its prefix cache holds."""
WORK_TOKENS = 1000.0
"""Prompt tokens that a request of another router stands for until this one has sent some to the engine."""
WORK_WEIGHT = 0.1
"""Of the newest request in the average of what requests have to compute."""


class Engine(msgspec.Struct, kw_only=True):
    """One engine and what this router has seen and done since."""

    engine_id: str
    role: Role
    http_url: str
    model: str = ""
    """Empty on a static engine: it is asked for any model."""
    incarnation: str = ""
    compat_hash: str = ""
    static: bool = False
    draining: bool = False
    load: LoadReported | None = None
    load_at_s: float = 0.0
    sent_since_load: int = 0
    in_flight: int = 0
    """Requests of this router that the engine has not finished."""
    says_cache: bool = False
    """It says what its prefix cache holds."""
    work_tokens: int = 0
    """Prompt tokens that those requests had to compute."""
    mean_work: float = WORK_TOKENS
    in_flight_at_load: int = 0
    work_of_others: int = 0
    """What other routers have sent since the engine's last report, as they say."""
    rests_until_s: float = 0.0
    missing: bool = False

    def view(self, now_s: float, hit_tokens: int = 0, cache: Literal["", "exact", "degraded"] = "") -> EngineView:
        """As a policy sees it. Without a report, what this router itself has in flight stands in for the load.

        What others have sent is reckoned from the report's count, each at the average of this router's own.
        """
        load = self.load
        if load is None:
            return EngineView(
                engine_id=self.engine_id,
                role=self.role,
                running=self.in_flight,
                hit_tokens=hit_tokens,
                queued_tokens=self.work_tokens,
                cache=cache,
            )
        others = max(0, load.running + load.waiting - self.in_flight_at_load)
        return EngineView(
            engine_id=self.engine_id,
            role=self.role,
            running=load.running,
            waiting=load.waiting + self.sent_since_load,
            free_blocks=min(load.free_blocks + load.held_blocks, load.total_blocks),  # what is held yields
            total_blocks=load.total_blocks,
            load_age_ms=(now_s - self.load_at_s) * 1000.0,
            hit_tokens=hit_tokens,
            queued_tokens=self.work_tokens + self.work_of_others + int(others * self.mean_work),
            cache=cache,
        )


class Fleet:
    """All engines, by engine_id."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self._grace_until_s = float("-inf")
        self._alive: dict[tuple[Role, bool | None], list[Engine]] = {}

    def add_static(self, engine: Engine) -> None:
        """An engine from the command line; it stays."""
        self.engines[engine.engine_id] = engine
        self._alive.clear()

    def card_seen(self, card: EngineCard) -> Engine | None:
        """Take a card. Returns the engine that it replaces if that one was of an earlier incarnation, hence dead."""
        self._alive.clear()
        known = self.engines.get(card.engine_id)
        if known is not None and (known.static or known.incarnation == card.incarnation):
            known.draining = card.draining
            known.missing = False
            return None
        self.engines[card.engine_id] = Engine(
            engine_id=card.engine_id,
            role=card.role,
            http_url=card.http_url.rstrip("/"),
            model=card.model,
            incarnation=card.incarnation,
            compat_hash=card.compat_hash,
            draining=card.draining,
            says_cache=CACHE in card.capabilities,
        )
        return known

    def card_gone(self, engine_id: str, now_s: float) -> None:
        """The card was withdrawn or has expired. Within the grace after a reconnect it may only be late."""
        engine = self.engines.get(engine_id)
        if engine is None or engine.static:
            return
        if now_s < self._grace_until_s:
            engine.missing = True
        else:
            self._forget(engine_id)

    def bus_returned(self, now_s: float) -> None:
        """NATS is reachable again; it may have forgotten every card."""
        self._grace_until_s = now_s + RETURN_GRACE_S

    def tick(self, now_s: float) -> None:
        """Forget the engines that did not come back within the grace."""
        if now_s >= self._grace_until_s:
            for engine in [engine for engine in self.engines.values() if engine.missing]:
                self._forget(engine.engine_id)

    def _forget(self, engine_id: str) -> None:
        del self.engines[engine_id]
        self._alive.clear()

    def load_seen(self, report: LoadReported, now_s: float) -> None:
        """Take a load report; one of an engine or an incarnation that is not known is ignored."""
        engine = self.engines.get(report.engine_id)
        if engine is not None and engine.incarnation == report.incarnation:
            engine.load = report
            engine.load_at_s = now_s
            engine.sent_since_load = 0
            engine.in_flight_at_load = engine.in_flight
            engine.work_of_others = 0

    def sent(self, engine_id: str, work_tokens: int = 0) -> None:
        """A leg is on its way to the engine, which has to compute so many prompt tokens for it, at a guess."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.sent_since_load += 1
            engine.in_flight += 1
            engine.work_tokens += work_tokens
            engine.mean_work += WORK_WEIGHT * (work_tokens - engine.mean_work)

    def sent_by_others(self, engine_id: str, work_tokens: int = 0) -> None:
        """Another router says that a leg of its own is on its way there; the next report will have it."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.sent_since_load += 1
            engine.work_of_others += work_tokens

    def finished(self, engine_id: str, work_tokens: int = 0) -> None:
        """That leg is over; `work_tokens` as when it was sent."""
        engine = self.engines.get(engine_id)
        if engine is not None and engine.in_flight:
            engine.in_flight -= 1
            engine.sent_since_load = max(0, engine.sent_since_load - 1)
            engine.work_tokens = max(0, engine.work_tokens - work_tokens)

    def failed(self, engine_id: str, now_s: float) -> None:
        """The engine failed a request: let it rest."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.rests_until_s = now_s + REST_S

    def alive(self, role: Role, *, static: bool | None = None) -> list[Engine]:
        """The engines of a role that take requests; `static` restricts to those from the command line or the bus.
        Not to be changed: the list is kept until a card changes."""
        found = self._alive.get((role, static))
        if found is None:
            found = self._alive[role, static] = [
                engine
                for engine in self.engines.values()
                if engine.role == role and not engine.draining and static in {None, engine.static}
            ]
        return found

    def held_blocks(self) -> dict[str, int]:
        """Blocks that decodes keep for conversations, as they report."""
        return {
            engine.engine_id: engine.load.held_blocks
            for engine in self.engines.values()
            if engine.role == "decode" and engine.load is not None
        }

    def models(self) -> set[str]:
        """The models of the engines on the bus."""
        return {engine.model for engine in self.engines.values() if engine.model}

    def serving(self, engines: list[Engine], model: str) -> list[Engine]:
        """Those that serve `model`. With one model in the fleet any name goes to its engines, which know their
        aliases and adapters; with several an unknown one raises BadRequestError."""
        models = self.models()
        if len(models) <= 1:
            return engines
        if not model:
            raise BadRequestError(f"name a model, one of {', '.join(sorted(models))}", code="model_missing")
        if model not in models:
            known = ", ".join(sorted(models))
            raise BadRequestError(
                f"model {model!r} does not exist: use one of {known}", code="model_not_found", status=404
            )
        return [engine for engine in engines if engine.model in {model, ""}]


def rested(engines: list[Engine], now_s: float, avoid: Collection[str]) -> list[Engine]:
    """Without those that failed lately, or that this request was sent to already, as long as others are left."""
    fresh = engines
    if avoid:
        fresh = [engine for engine in engines if engine.engine_id not in avoid] or engines
    return [engine for engine in fresh if engine.rests_until_s <= now_s] or fresh


def compatible(prefills: list[Engine], decodes: list[Engine]) -> tuple[list[Engine], list[Engine]]:
    """Prefills and decodes whose KV blocks mean the same. Of several such groups (a rolling upgrade) the one with the
    fewest requests per decode; all decodes and no prefill where none fit together."""
    hashes = {engine.compat_hash for engine in prefills}
    if len(hashes) == 1 and hashes == {engine.compat_hash for engine in decodes}:
        return prefills, decodes
    shared = sorted(hashes & {engine.compat_hash for engine in decodes})
    if not shared:
        return [], decodes
    best = min(shared, key=lambda compat: _crowding([e for e in decodes if e.compat_hash == compat]))
    return [e for e in prefills if e.compat_hash == best], [e for e in decodes if e.compat_hash == best]


def _crowding(engines: Sequence[Engine]) -> float:
    views = [engine.view(0.0) for engine in engines]
    return sum(view.running + view.waiting for view in views) / len(views)
