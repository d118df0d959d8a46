"""A stranger's answer, cut down to what may be kept of it: it is shown to people and written into the trace. Pure."""

import math

from kvbus.router.offered import Offered
from kvbus.router.policies import RouteChoice
from kvbus_schemas import Candidate, RouteAnswered

REASON_CHARS_MAX = 200
CANDIDATES_MAX = 256
TERMS_MAX = 16
TERM_CHARS_MAX = 32


def choice_of(answer: RouteAnswered, offered: Offered) -> RouteChoice:
    """The choice in an answer that `offered` finds nothing wrong with."""
    return RouteChoice(
        mode=answer.mode,
        prefill_id=answer.prefill_id,
        decode_id=answer.decode_id,
        reason=printable(answer.reason, REASON_CHARS_MAX),
        candidates=[_cut(one) for one in answer.candidates[:CANDIDATES_MAX] if _is_of(one, offered)],
    )


def printable(text: str, chars_max: int) -> str:
    """The beginning of `text`, without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text[:chars_max])


def _is_of(candidate: Candidate, offered: Offered) -> bool:
    engines = offered.prefills if candidate.role == "prefill" else offered.decodes
    return candidate.engine_id in engines and math.isfinite(candidate.score)


def _cut(candidate: Candidate) -> Candidate:
    terms = {
        printable(name, TERM_CHARS_MAX): value
        for name, value in list(candidate.terms.items())[:TERMS_MAX]
        if math.isfinite(value)
    }
    age_ms = candidate.load_age_ms if math.isfinite(candidate.load_age_ms) else 0.0
    return Candidate(
        engine_id=candidate.engine_id, role=candidate.role, score=candidate.score, terms=terms, load_age_ms=age_ms
    )
