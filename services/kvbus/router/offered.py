"""What may be answered to a question, whoever answers: a policy in this process or a router on the bus. Pure."""

from typing import Literal

import msgspec

from kvbus.router.policies import RouteQuestion
from kvbus_schemas import Mode

NAME_CHARS_MAX = 64


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with an answer."""

    kind: Literal["unknown_engine", "wrong"]
    why: str


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that may be chosen, and in which mode."""

    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    asked: Mode | None = None
    second: bool = False
    """Only a decode is asked for: prefill is done (mode deferred)."""

    def fault(self, mode: Mode, prefill_id: str, decode_id: str) -> Fault | None:
        """Why the answer cannot be used; None if it can."""
        for engine_id, offered in ((prefill_id, self.prefills), (decode_id, self.decodes)):
            if engine_id and engine_id not in offered:
                return Fault("unknown_engine", f"{engine_id[:NAME_CHARS_MAX]!r} was not among the candidates")
        why = self._wrong_mode(mode) or self._wrong_parts(mode, prefill_id, decode_id)
        return Fault("wrong", why) if why else None

    def _wrong_mode(self, mode: Mode) -> str:
        """The client's wish holds, except that without a prefill all is local; so may be what stock engines serve."""
        asked = self.asked
        if self.second or mode == asked or (mode == "local" and (not self.prefills or asked == "pull")):
            return ""
        if "pull" in {mode, asked}:
            return f"mode {mode} does not fit these engines"
        return "" if asked is None else f"mode {mode} where {asked} is asked for"

    def _wrong_parts(self, mode: Mode, prefill_id: str, decode_id: str) -> str:
        if not self.second and (not prefill_id) != (mode == "local"):
            return f"mode {mode} with prefill {prefill_id!r}"
        if not decode_id and (mode != "deferred" or self.second):
            return f"mode {mode} without a decode"
        return ""


def offered_in(question: RouteQuestion) -> Offered:
    """What a question offers."""
    return Offered(
        prefills=tuple([view.engine_id for view in question.prefills]),
        decodes=tuple([view.engine_id for view in question.decodes]),
        asked=question.asked,
        second=question.part == "decode",
    )
