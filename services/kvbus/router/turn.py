"""One request's part in its conversation: what was claimed for it, and what became of that. Pure.

Theory of operation. A claim is asked for once, before the first dispatch. A grant then ends in exactly one of: taken
(prefill's answer says how much of it), or let go, which tells its holder to free the blocks. It is let go when the
dispatch cannot use it (`bind`), when prefill's leg fails or is closed, and when prefill never hears of it. A repeat of
either is a no-op, so that every path may end the claim without asking whether another one has.
"""

import re

import msgspec

from kvbus.router.fleet import Engine
from kvbus_schemas import Mode, Post, ReuseAnswered, ReuseGrant, ReuseReleased
from kvbus_schemas.ticket import TICKET_KEY

REUSING_MODES: tuple[Mode, ...] = ("early", "deferred")
"""Modes whose prefill gets a ticket, and with it a grant."""
OFFERING_MODES: tuple[Mode, ...] = (*REUSING_MODES, "local")
"""Modes whose decode keeps a conversation."""
REASON_CHARS_MAX = 32

_WORDS = re.compile(r"[^a-z0-9]+")


class Report(msgspec.Struct, frozen=True):
    """What prefill says of its claim, in `kv_transfer_params.kvbus` of its answer."""

    reused_tokens: int = 0
    reuse: str = ""


class _Params(msgspec.Struct, frozen=True):
    kvbus: Report | None = msgspec.field(default=None, name=TICKET_KEY)


_params = msgspec.json.Decoder(_Params)


class Turn:
    """`conversation` is the key; empty where the request belongs to none, or reuse is switched off."""

    def __init__(self, conversation: str = "") -> None:
        self.conversation = conversation
        self.grant: ReuseGrant | None = None
        """What prefill's ticket brings; None once it is let go."""
        self.tokens = 0
        """Tokens that were taken over; what was granted, as long as prefill has not answered."""
        self.reason = "disabled"
        """Why there is no hit."""
        self._open = False

    @property
    def said(self) -> str:
        """The value of X-Kvbus-Reuse."""
        return f"hit tokens={self.tokens}" if self.tokens else f"miss reason={self.reason}"

    @property
    def is_open(self) -> bool:
        """True while the grant is neither taken nor let go."""
        return self._open

    def answered(self, answer: ReuseAnswered) -> None:
        """The claim's answer. What is no grant to be used is a miss."""
        self.reason = answer.miss or "unavailable"
        if answer.grant is not None and answer.grant.transfer_id and answer.grant.token_count > 0:
            self.grant = answer.grant
            self.tokens = answer.grant.token_count
            self._open = True

    def bind(self, mode: Mode, prefill: Engine | None, holder: Engine | None) -> tuple[Post, ...]:
        """The dispatch is chosen: whom to tell, if it cannot use the grant. `holder` is None where nobody knows it."""
        grant = self.grant
        if grant is None or not self._open:
            return ()
        if prefill is None or mode not in REUSING_MODES:
            return self.let_go("local" if mode == "local" else "disabled")
        if holder is None or holder.incarnation != grant.holder_incarnation:
            return self.let_go("engine_gone")
        if holder.compat_hash != prefill.compat_hash:
            return self.let_go("incompatible")
        return ()

    def reported(self, params: bytes | None) -> tuple[Post, ...]:
        """Prefill has answered, with these `kv_transfer_params`. An answer that says nothing of the claim means that
        it was not used, and the holder is told."""
        if not self._open:
            return ()
        report = _report_of(params)
        if report is None:
            return self.let_go("unavailable")
        self._open = False
        self.tokens = max(0, report.reused_tokens)
        self.reason = _WORDS.sub("_", report.reuse.lower()).strip("_")[:REASON_CHARS_MAX] or "unavailable"
        return ()

    def let_go(self, reason: str) -> tuple[Post, ...]:
        """The claim is not used: whom to tell so. Nothing where there is no open claim."""
        grant = self.grant
        if grant is None or not self._open:
            return ()
        self._open = False
        self.grant = None
        self.tokens = 0
        self.reason = reason
        released = ReuseReleased(
            conversation=grant.conversation, offer_id=grant.offer_id, transfer_id=grant.transfer_id, reason=reason
        )
        return (Post(grant.holder_id, released),)


def _report_of(params: bytes | None) -> Report | None:
    try:
        return _params.decode(params).kvbus if params else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
