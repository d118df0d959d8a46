"""What a recorded router knew when it chose, as far as the recording tells. Pure.

A decision names the engines as its policy saw them, and the mode that was asked for: then the question is exactly the
recorded one. Recordings from before that, and fleets larger than a decision names, are put together from the rest.

Which engines were offered, and how old their loads were, stands in the decision's candidates. Loads are those that the
engines had reported, and what this router had sent since; where the candidates' terms name them, those are exact. The
tokens that an engine held of a conversation are those of the last answer. A role of which no candidate was recorded is
offered with all its engines.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from kvbus.replay.recording import Event, Gone, Recording
from kvbus.router.policies import HELD_TOKENS_PER_REQUEST, RouteQuestion
from kvbus_schemas import (
    Candidate,
    EngineCard,
    EngineView,
    LoadReported,
    Mode,
    ReuseAnswered,
    ReuseAsked,
    Role,
    RouteAsked,
    RouteDecided,
)

ASKED_FOR = "asked for"
"""How the built-in policies say that the mode was the client's wish; the wish itself is in no message."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A recorded decision, and the question that it answers."""

    event: Event
    decided: RouteDecided
    question: RouteQuestion


@dataclass(slots=True)
class _Known:
    """What has been heard so far."""

    cards: dict[str, EngineCard] = field(default_factory=dict)
    loads: dict[str, Event] = field(default_factory=dict)
    sent: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    asks: dict[tuple[str, str], RouteAsked] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)

    def hear(self, event: Event) -> None:
        """Take one line."""
        match event.message:
            case Gone():
                self.cards.pop(event.key, None)
            case EngineCard():
                self.cards[event.key] = event.message
            case LoadReported():
                self.loads[event.key] = event
                for place in [place for place in self.sent if place[1] == event.key]:
                    del self.sent[place]
            case ReuseAsked():
                self.held[event.key] = ("", 0)
            case ReuseAnswered():
                grant = event.message.grant
                self.held[event.key] = (grant.holder_id, grant.token_count) if grant else ("", 0)
            case RouteAsked():
                self.asks[event.message.request_id, event.message.part] = event.message
            case _:
                pass

    def view(self, router: str, engine_id: str, role: Role, now_s: float) -> EngineView:
        """An engine by what it has reported."""
        event = self.loads.get(engine_id)
        sent = self.sent[router, engine_id]
        if event is None or not isinstance(event.message, LoadReported):
            return EngineView(engine_id=engine_id, role=role, running=sent)
        load = event.message
        return EngineView(
            engine_id=engine_id,
            role=role,
            running=load.running,
            waiting=load.waiting + sent,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            load_age_ms=(now_s - event.at_s) * 1000,
        )


def questions_of(recording: Recording) -> list[Asked]:
    """Every recorded decision with the question behind it, in the order of time."""
    known = _Known()
    found: list[Asked] = []
    for event in recording.events:
        known.hear(event)
        if isinstance(event.message, RouteDecided):
            found.append(Asked(event, event.message, _question(event, event.message, known)))
            for engine_id in (event.message.prefill_id, event.message.decode_id):
                known.sent[event.sender, engine_id] += 1
            if event.message.mode == "deferred":
                known.deferred.add(event.message.transfer_id)
    return found


def _question(event: Event, decided: RouteDecided, known: _Known) -> RouteQuestion:
    is_second = decided.mode == "deferred" and decided.transfer_id in known.deferred
    ask = known.asks.get((decided.request_id, "decode" if is_second else "both"))
    cards = [known.cards[name] for name in (decided.prefill_id, decided.decode_id) if name in known.cards]
    return RouteQuestion(
        request_id=decided.request_id,
        model=cards[0].model if cards else "",
        prompt_bytes=decided.prompt_bytes,
        prefills=() if is_second else _views(event, decided, known, "prefill", ask),
        decodes=_views(event, decided, known, "decode", ask),
        conversation=decided.conversation,
        asked=_asked_mode(decided, is_second=is_second),
        part="decode" if is_second else "both",
        attempt=decided.attempt,
        prompt_tokens=decided.prompt_tokens,
        head=decided.head,
    )


def _asked_mode(decided: RouteDecided, *, is_second: bool) -> Mode | None:
    if decided.engines:
        return decided.asked
    if is_second or decided.mode == "pull" or ASKED_FOR in decided.reason:
        return decided.mode
    return None


def _views(event: Event, decided: RouteDecided, known: _Known, role: Role, ask: RouteAsked | None) -> list[EngineView]:
    seen = {view.engine_id: view for view in decided.engines if view.role == role}
    if decided.engines and not decided.engines_left_out:
        return list(seen.values())
    if ask is not None:
        return [view for view in ask.engines if view.role == role]
    named = {candidate.engine_id: candidate for candidate in decided.candidates if candidate.role == role}
    if not named and role == "prefill" and decided.mode == "local" and ASKED_FOR not in decided.reason:
        return []
    alive = [name for name, card in known.cards.items() if card.role == role and not card.draining]
    if seen:
        offered = [*seen, *(name for name in alive if name not in seen)]
    else:
        offered = [name for name in alive if name in named] + [name for name in named if name not in alive]
    holder, tokens = known.held.get(decided.conversation, ("", 0)) if decided.conversation else ("", 0)
    views = []
    for name in offered or alive:
        if name in seen:
            views.append(seen[name])
            continue
        view = known.view(event.sender, name, role, event.at_s)
        if name == holder:
            view = msgspec.structs.replace(view, hit_tokens=tokens)
        views.append(_exact(view, named[name]) if name in named else view)
    return views


def _exact(view: EngineView, candidate: Candidate) -> EngineView:
    """The view with what the candidate's terms say of it; the built-in policies write a load as a cost."""
    terms = candidate.terms
    exact: dict[str, int] = {name: round(abs(terms[name])) for name in ("running", "waiting") if name in terms}
    if "used_blocks" in terms and view.total_blocks:
        exact["free_blocks"] = round(view.total_blocks * (1.0 - abs(terms["used_blocks"])))
    if "held_tokens" in terms:
        exact["hit_tokens"] = round(terms["held_tokens"] * HELD_TOKENS_PER_REQUEST)
    return msgspec.structs.replace(view, load_age_ms=candidate.load_age_ms, **exact)
