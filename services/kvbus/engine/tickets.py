"""The tickets of an engine's requests: read once when a request comes in, known until it ends."""

from typing import Any, NamedTuple

import structlog

from kvbus.engine.facts import prompt_digest
from kvbus.engine.identity import Identity
from kvbus_schemas import Ticket, TicketError, ticket_from_params

log = structlog.get_logger()


class Ticketed(NamedTuple):
    """A request's ticket and the names that follow from its prompt."""

    ticket: Ticket
    key: str
    """The transfer's key on the bus: the transfer id, and with several prompts in one request their digest too."""
    digest: str


class Tickets:
    """By vLLM's request id."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.refused = 0
        self._known: dict[str, Ticketed] = {}

    def read(self, request: Any) -> Ticketed | None:
        """Take the ticket of a new request. A bad one is counted, and the request goes on without a transfer."""
        try:
            ticket = ticket_from_params(request.kv_transfer_params)
            if ticket is None:
                return None
            ticket.check(self.identity.engine_id, self.identity.incarnation)
        except TicketError as error:
            self._refuse(str(error))
            return None
        tokens = request.prompt_token_ids
        if not tokens:
            self._refuse("the prompt has no token ids (embeddings): send the request in mode local")
            return None
        digest = prompt_digest(ticket.transfer_id, tokens, len(tokens))
        key = ticket.transfer_id if ticket.parts == 1 else f"{ticket.transfer_id}-{digest}"
        known = self._known[request.request_id] = Ticketed(ticket, key, digest)
        return known

    def _refuse(self, error: str) -> None:
        self.refused += 1
        log.warning("ticket_refused", error=error)

    def of(self, request_id: str) -> Ticketed | None:
        return self._known.get(request_id)

    def has(self, key: str) -> bool:
        """Whether a request with this transfer is there."""
        return any(known.key == key for known in self._known.values())

    def forget(self, request_id: str) -> Ticketed | None:
        return self._known.pop(request_id, None)
