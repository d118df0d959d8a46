"""The ticket: what the router puts into `kv_transfer_params` of both HTTP legs, under the key `kvbus`."""

from typing import Any, Literal

import msgspec

TICKET_KEY = "kvbus"
"""Key of the ticket inside vLLM's `kv_transfer_params`."""

Mode = Literal["early", "deferred", "pull", "local"]
TicketRole = Literal["produce", "consume"]

MAX_DEADLINE_S = 3600.0
TRANSFER_ID_DIGITS = 32


class TicketError(ValueError):
    """A ticket that cannot be honoured. The text says which field is wrong and what it should be."""


class ReuseGrant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation's blocks that the prefill may take back from a decode engine (see `ReuseOffered`)."""

    transfer_id: str
    """The transfer that moves the blocks; its producer is the decode engine that holds them."""
    offer_id: str
    holder_id: str
    holder_incarnation: str
    conversation: str
    token_count: int
    block_size: int
    chain: list[bytes]
    """Digest chain over the held tokens: one link per full block, and one for the tail if there is one."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine's part in one transfer."""

    transfer_id: str
    """32 hexadecimal digits, issued by the router, new for every dispatch, also for a retry."""
    role: TicketRole
    mode: Mode
    producer_id: str
    producer_incarnation: str = ""
    consumer_id: str = ""
    """Empty on a prefill leg in mode `deferred`: the decode is chosen later."""
    consumer_incarnation: str = ""
    deadline_s: float = 120.0
    """Seconds, from the arrival of this ticket, in which the transfer must end."""
    request_id: str = ""
    trace_id: str = ""
    span_id: str = ""
    version: int = 1
    parts: int = 1
    """Prompts in the request; with more than one, each has its own transfer, named by its prompt digest."""
    conversation: str = ""
    """Key of the conversation, under which decode offers its blocks afterwards; empty: offer nothing."""
    reuse: ReuseGrant | None = None

    def check(self, engine_id: str, incarnation: str) -> None:
        """Raise TicketError unless this ticket is well formed, alive and for this engine's incarnation."""
        if self.version != 1:
            raise TicketError(f"ticket version {self.version} is not known here: send version 1")
        _check_hex("transfer_id", self.transfer_id)
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise TicketError(
                f"ticket {self.transfer_id} has expired or asks too long: deadline_s is {self.deadline_s}, "
                f"it must be above 0 and at most {MAX_DEADLINE_S:.0f}"
            )
        mine = (self.producer_id, self.producer_incarnation)
        if self.role == "consume":
            mine = (self.consumer_id, self.consumer_incarnation)
        if mine[0] != engine_id:
            raise TicketError(f"ticket {self.transfer_id} is for engine {mine[0]!r}, this is {engine_id!r}")
        if mine[1] and mine[1] != incarnation:
            raise TicketError(
                f"ticket {self.transfer_id} is for incarnation {mine[1]!r} of {engine_id!r}, this is "
                f"{incarnation!r}: the engine was restarted, dispatch the request again"
            )

    def to_params(self) -> dict[str, Any]:
        """The value of `kv_transfer_params` that carries this ticket, ready for JSON."""
        ticket: dict[str, Any] = msgspec.to_builtins(self)
        return {TICKET_KEY: ticket}


def _check_hex(name: str, value: str) -> None:
    if len(value) != TRANSFER_ID_DIGITS or not set(value) <= set("0123456789abcdef"):
        raise TicketError(f"ticket field {name} must be {TRANSFER_ID_DIGITS} lower-case hexadecimal digits")


def ticket_from_params(params: Any) -> Ticket | None:
    """The ticket inside `kv_transfer_params`, or None if there is none. Raises TicketError on a malformed one."""
    if not isinstance(params, dict) or TICKET_KEY not in params:
        return None
    try:
        return msgspec.convert(params[TICKET_KEY], Ticket)
    except msgspec.ValidationError as error:
        raise TicketError(f"malformed ticket in kv_transfer_params.{TICKET_KEY}: {error}") from error
