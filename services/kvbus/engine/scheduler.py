"""vLLM's scheduler hooks, in vLLM's words on the outside and the cores' on the inside.

Runs in the engine core's own thread. No hook does I/O: what is to be said goes to the link's queue, what was heard
comes from one. vLLM's objects are used as they come (requests, scheduler output); vLLM itself is not imported.
"""

import time
from collections import deque
from typing import Any

import structlog

from kvbus.engine.consumer import ConsumerCore, Steps
from kvbus.engine.facts import MATCHER, Expect, Progress, StepOrders, Terms, blocks_for, prompt_digest
from kvbus.engine.handle import EngineHandle
from kvbus.engine.identity import Identity
from kvbus.engine.link import Link
from kvbus.engine.peers import Peers
from kvbus.engine.producer import ProducerCore, ProducerSteps
from kvbus.engine.settings import EngineSettings
from kvbus_schemas import (
    BlocksRegistered,
    BlocksUnavailable,
    EngineCard,
    Message,
    Post,
    PushOrdered,
    Ticket,
    TicketError,
    ticket_from_params,
)

log = structlog.get_logger()

HEARD_MAX = 100_000
"""Messages that wait for the engine's next step; more are dropped, oldest first."""
TICK_S = 0.25


class SchedulerSide:
    """One engine's scheduler. `block_size` in tokens."""

    def __init__(self, identity: Identity, settings: EngineSettings, link: Link, handle: EngineHandle) -> None:
        self.identity, self.settings = identity, settings
        self.link, self.handle = link, handle
        self.peers = Peers()
        self.consumer = ConsumerCore(identity.engine_id, self.peers)
        self.producer = ProducerCore(identity.engine_id, identity.block_size)
        self.tickets: dict[str, Ticket] = {}
        self.keys: dict[str, tuple[str, str]] = {}
        self.told: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        """By request: tokens that came out of the prefix cache when it was first scheduled."""
        self.orders = StepOrders()
        self.heard: deque[Message] = deque(maxlen=HEARD_MAX)
        self.gone: deque[tuple[str, str]] = deque(maxlen=1024)
        self.ticked_s = 0.0
        self.tickets_refused = 0

    # From the link's thread.

    def hear(self, message: Message) -> None:
        """A message for this engine has come in."""
        self.heard.append(message)
        self.handle.notify()

    def seen(self, card: EngineCard) -> None:
        """A peer's card was put."""
        replaced = self.peers.seen(card, time.monotonic())
        if replaced is not None:
            self._lost(replaced)

    def engine_gone(self, engine_id: str) -> None:
        """A peer's card is gone."""
        card = self.peers.gone(engine_id, time.monotonic())
        if card is not None:
            self._lost(card)

    def _lost(self, card: EngineCard) -> None:
        self.gone.append((card.engine_id, card.incarnation))
        self.handle.notify()

    # vLLM's hooks.

    def on_new_request(self, request: Any) -> None:
        """Read the request's ticket. A bad one is counted, and the request is served without a transfer."""
        try:
            ticket = ticket_from_params(request.kv_transfer_params)
            if ticket is None:
                return
            ticket.check(self.identity.engine_id, self.identity.incarnation)
        except TicketError as error:
            self.tickets_refused += 1
            log.warning("ticket_refused", error=str(error))
            return
        tokens = request.prompt_token_ids
        if not tokens:
            self.tickets_refused += 1
            log.warning("ticket_refused", error="the prompt has no token ids (embeddings): send it in mode local")
            return
        digest = prompt_digest(ticket.transfer_id, tokens, len(tokens))
        key = ticket.transfer_id if ticket.parts == 1 else f"{ticket.transfer_id}-{digest}"
        self.tickets[request.request_id] = ticket
        self.keys[request.request_id] = (key, digest)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens, beyond `computed`, a push will bring; None: ask again in the next step."""
        ticket = self.tickets.get(request.request_id)
        if ticket is None or ticket.role != "consume":
            return 0, False
        key, _ = self.keys[request.request_id]
        owner = self.consumer.owner_of(key)
        if owner is not None:  # `n` > 1: one sequence takes the push, the others then find it in the prefix cache
            return (None, False) if owner != request.request_id else (0, False)
        if self._why_local(request, ticket, key, computed):
            return 0, False
        return len(request.prompt_token_ids) - computed, True

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """vLLM has allocated blocks: a producer is admitted, a consumer registers."""
        ticket = self.tickets.get(request.request_id)
        if ticket is None:
            return
        now_s = time.monotonic()
        key, digest = self.keys[request.request_id]
        if ticket.role == "produce":
            terms = Terms(key, request.request_id, len(request.prompt_token_ids), digest)
            self._produced(self.producer.admit(ticket, terms, now_s))
        elif external > 0:
            self._register(request, ticket, block_ids, external, now_s)
        elif not self.consumer.knows(key):
            reason = self._why_local(request, ticket, key, request.num_computed_tokens) or "computed by decode"
            log.info("transfer_skipped", transfer_id=key, reason=reason)
            self._consumed(self.consumer.skip(key, ticket.producer_id, reason))

    def build(self, output: Any) -> StepOrders:
        """End of a schedule: what this step tells the ranks. Sleeps when the engine can only wait."""
        now_s = time.monotonic()
        self._listen(now_s)
        self._follow(output)
        if output.total_num_scheduled_tokens == 0 and not self.orders and self._waits():
            self.handle.wait(self.settings.wait_max_ms / 1e3, lambda: bool(self.heard or self.gone))
            self._listen(time.monotonic())
        orders, self.orders = self.orders, StepOrders()
        return orders

    def took(self, finished_recving: set[str] | None, finished_sending: set[str] | None) -> None:
        """Ranks have given requests back. What the cores do not know is taken out, since vLLM would die of it."""
        now_s = time.monotonic()
        for request_id in list(finished_recving or ()):
            if request_id not in self.consumer.by_request:
                log.error("unknown_request_received", request_id=request_id)
                assert finished_recving is not None
                finished_recving.discard(request_id)
                continue
            self._consumed(self.consumer.reported(request_id, now_s))
        for request_id in list(finished_sending or ()):
            if request_id not in self.producer.by_request:
                log.error("unknown_request_sent", request_id=request_id)
                assert finished_sending is not None
                finished_sending.discard(request_id)
                continue
            self.told.pop(self.producer.by_request[request_id], None)
            self.producer.reported(request_id)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """vLLM's request has ended. True: its blocks stay until it is reported as sent."""
        now_s = time.monotonic()
        ticket = self.tickets.pop(request.request_id, None)
        key, _ = self.keys.pop(request.request_id, ("", ""))
        cached = self.cached.pop(request.request_id, 0)
        if ticket is None:
            return False
        if ticket.role == "consume":
            self._consumed(self.consumer.aborted(request.request_id, now_s))
            self._consumed(self.consumer.skip(key, ticket.producer_id, "ended before it was scheduled"))
            return False
        if self.producer.transfer_of(request.request_id) is None:
            self._never_computed(ticket, key)
            return False
        ok = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        groups = [list(group) for group in block_ids]
        self._produced(
            self.producer.finished(request.request_id, ok=ok, block_ids=groups, cached_tokens=cached, now_s=now_s)
        )
        return True

    # Inside.

    def _why_local(self, request: Any, ticket: Ticket, key: str, computed: int) -> str:
        """Why decode computes the prompt itself; empty when it waits for a push."""
        left = len(request.prompt_token_ids) - computed
        if self.consumer.knows(key):
            return "the ticket was used before"
        if left < self.settings.local_below_blocks * self.identity.block_size:
            return "the prefix is here already"
        if not self.link.connected:
            return "the bus is not connected"
        if self.peers.card(ticket.producer_id, ticket.producer_incarnation) is None:
            return f"prefill {ticket.producer_id} is not known here"
        return ""

    def _register(
        self, request: Any, ticket: Ticket, block_ids: tuple[list[int], ...], external: int, now_s: float
    ) -> None:
        key, digest = self.keys[request.request_id]
        producer = self.peers.card(ticket.producer_id)
        assert producer is not None
        token_count = len(request.prompt_token_ids)
        size = self.identity.block_size
        first = (token_count - external) // size
        groups = [list(group[first : blocks_for(token_count, size)]) for group in block_ids]
        registration = BlocksRegistered(
            transfer_id=key,
            producer_id=producer.engine_id,
            producer_incarnation=producer.incarnation,
            consumer_id=self.identity.engine_id,
            consumer_incarnation=self.identity.incarnation,
            block_ids=groups,
            first_block=first,
            token_count=token_count,
            prompt_digest=digest,
            block_size=size,
            compat_hash=self.identity.compat_hash,
            consumer_tp_size=self.identity.tp_size,
            lease_s=ticket.deadline_s,
            request_id=ticket.request_id,
            trace_id=ticket.trace_id,
            span_id=ticket.span_id,
        )
        self.orders.expected.append(Expect(key, request.request_id, first, len(groups[0]), producer.tp_size))
        self._consumed(self.consumer.register(registration, request.request_id, now_s))

    def _never_computed(self, ticket: Ticket, key: str) -> None:
        unavailable = BlocksUnavailable(
            transfer_id=key,
            producer_id=self.identity.engine_id,
            reason="aborted",
            detail="the prefill request ended before it was scheduled",
        )
        self.link.post([Post(to, unavailable) for to in {ticket.consumer_id or MATCHER, MATCHER}])

    def _listen(self, now_s: float) -> None:
        while self.gone:
            gone = self.gone.popleft()
            self._produced(self.producer.consumer_gone(*gone))
            self._consumed(self.consumer.producer_gone(*gone, now_s))
        while self.heard:
            message = self.heard.popleft()
            if isinstance(message, PushOrdered):
                self.producer.consumer_known(message.transfer_id, message.consumer_id, message.consumer_incarnation)
                continue
            self._consumed(self.consumer.receive(message, now_s))
            self._produced(self.producer.receive(message))
        if now_s - self.ticked_s >= TICK_S:
            self.ticked_s = now_s
            self._consumed(self.consumer.tick(now_s))
            self._produced(self.producer.tick(now_s))

    def _follow(self, output: Any) -> None:
        """Tell the ranks how far this step brings each producer request."""
        for new in output.scheduled_new_reqs:
            if new.req_id in self.tickets:
                self.cached[new.req_id] = new.num_computed_tokens
            self._advance(output, new.req_id, new.block_ids, new.num_computed_tokens, restarted=False)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._advance(output, request_id, block_ids, computed, restarted=request_id in cached.resumed_req_ids)
        for request_id in output.preempted_req_ids or ():
            transfer_id = self.producer.transfer_of(request_id)
            if transfer_id is not None:
                self.orders.preempted.append(transfer_id)

    def _advance(
        self, output: Any, request_id: str, block_ids: tuple[list[int], ...] | None, computed: int, *, restarted: bool
    ) -> None:
        transfer_id = self.producer.transfer_of(request_id)
        if transfer_id is None:
            return
        done = computed + output.num_scheduled_tokens[request_id]
        tokens = self.producer.open[transfer_id].terms.token_count
        final = done >= tokens
        new = tuple(block_ids[0]) if block_ids else ()
        first = 0 if restarted else self.told.get(transfer_id, 0)
        self.told[transfer_id] = first + len(new)
        ready = blocks_for(tokens, self.identity.block_size) if final else done // self.identity.block_size
        self.orders.progress.append(Progress(transfer_id, request_id, new, first, ready, final, restarted))

    def _waits(self) -> bool:
        return bool(self.consumer.open) or self.producer.holding()

    def _consumed(self, steps: Steps) -> None:
        self.link.post(steps.posts)
        self.orders.concluded |= steps.conclude
        self.orders.hinted += steps.hinted

    def _produced(self, steps: ProducerSteps) -> None:
        self.link.post(steps.posts)
        self.orders.admitted += steps.admitted
        self.orders.held += steps.held
        self.orders.released += steps.released
