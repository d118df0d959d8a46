"""vLLM's scheduler hooks, in vLLM's words on the outside and the cores' on the inside.

Runs in the engine core's own thread. No hook does I/O: what is to be said goes to the link's queue, what was heard
comes from one. vLLM's objects are used as they come (requests, scheduler output); vLLM itself is not imported.
"""

import time
from collections import deque
from typing import Any

import structlog

from kvbus.engine.cache_side import CacheSide
from kvbus.engine.consumer import ConsumerCore, Steps
from kvbus.engine.facts import MATCHER, Expect, StepOrders, Terms
from kvbus.engine.following import Follower
from kvbus.engine.handle import EngineHandle
from kvbus.engine.identity import Identity
from kvbus.engine.link import Link
from kvbus.engine.peers import Peers
from kvbus.engine.producer import ProducerCore, ProducerSteps
from kvbus.engine.registering import BlockIds, push_of, return_of
from kvbus.engine.reuse_side import ReuseSide
from kvbus.engine.settings import EngineSettings
from kvbus.engine.tickets import Ticketed, Tickets
from kvbus_schemas import (
    BlocksRegistered,
    BlocksUnavailable,
    EngineCard,
    Message,
    Post,
    PushOrdered,
    Ticket,
)
from kvbus_schemas.ticket import TICKET_KEY

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
        self.reuse = ReuseSide(identity, settings, link)
        self.cache = CacheSide(identity, settings, link)
        self.tickets = Tickets(identity)
        self.follower = Follower(self.producer)
        self.orders = StepOrders()
        self.heard: deque[Message] = deque(maxlen=HEARD_MAX)
        self.gone: deque[tuple[str, str]] = deque(maxlen=1024)
        self.ticked_s = 0.0

    # From the link's thread.

    def hear(self, message: Message) -> None:
        """A message for this engine has come in."""
        if self.cache.hear(message):
            return
        self.heard.append(message)
        self.handle.notify()
        if self.reuse.concerns(message):
            self.handle.wake_idle()

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
        """Read the request's ticket, if it has one."""
        known = self.tickets.read(request)
        if known is not None and known.ticket.role == "produce":
            self.reuse.claim(request, known.ticket)
            if self.cache.on and known.ticket.parts == 1:
                count = len(request.prompt_token_ids)
                self.cache.prompt(known.key, request.block_hashes[: count // self.identity.block_size], count)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens, beyond `computed`, a transfer will bring; None: ask again in the next step."""
        known = self.tickets.of(request.request_id)
        if known is None:
            return 0, False
        if known.ticket.role == "produce":
            gain = self._gain(request, computed)
            return gain, gain > 0
        owner = self.consumer.owner_of(known.key)
        if owner is not None:  # `n` > 1: one sequence takes the push, the others then find it in the prefix cache
            return (None, False) if owner != request.request_id else (0, False)
        if self._why_local(request, known, computed):
            return 0, False
        return len(request.prompt_token_ids) - computed, True

    def allocated(self, request: Any, block_ids: BlockIds, external: int) -> None:
        """vLLM has allocated blocks: a producer is admitted, a consumer registers."""
        known = self.tickets.of(request.request_id)
        if known is None:
            return
        now_s = time.monotonic()
        if known.ticket.role == "produce":
            terms = Terms(known.key, request.request_id, len(request.prompt_token_ids), known.digest)
            self._produced(self.producer.admit(known.ticket, terms, now_s))
            if external > 0:
                self._take_back(request, known.ticket, block_ids, external, now_s)
            else:
                self.reuse.let_go(request.request_id)
        elif external > 0:
            self._register(request, known, block_ids, external, now_s)
        elif not self.consumer.knows(known.key):
            reason = self._why_local(request, known, request.num_computed_tokens) or "computed by decode"
            log.info("transfer_skipped", transfer_id=known.key, reason=reason)
            self._consumed(self.consumer.skip(known.key, known.ticket.producer_id, reason))

    def build(self, output: Any) -> StepOrders:
        """End of a schedule: what this step tells the ranks. Sleeps when the engine can only wait."""
        now_s = time.monotonic()
        self._listen(now_s)
        self.follower.follow(output, self.orders)
        self.reuse.make_room(pressed=self._pressed(output))
        if output.total_num_scheduled_tokens == 0 and not self.orders and self._waits():
            self.handle.wait(self.settings.wait_max_ms / 1e3, lambda: bool(self.heard or self.gone))
            self._listen(time.monotonic())
        orders, self.orders = self.orders, StepOrders()
        return orders

    def took(
        self,
        finished_recving: set[str] | None,
        finished_sending: set[str] | None,
        failed_recving: set[str] | None = None,
    ) -> None:
        """Ranks have given requests back, some without their data. What the cores do not know is taken out, since vLLM
        would die of it."""
        now_s = time.monotonic()
        for request_id in sorted(finished_recving or ()):
            if request_id not in self.consumer.by_request:
                log.error("unknown_request_received", request_id=request_id)
                assert finished_recving is not None
                finished_recving.discard(request_id)
                continue
            transfer_id = self.consumer.by_request[request_id]
            failed = None if failed_recving is None else request_id in failed_recving
            self._consumed(self.consumer.reported(request_id, now_s, failed=failed))
            self.reuse.ended(request_id, transfer_id, completed=self.consumer.closed[transfer_id] == "completed")
        for request_id in sorted(finished_sending or ()):
            if request_id not in self.producer.by_request:
                log.error("unknown_request_sent", request_id=request_id)
                assert finished_sending is not None
                finished_sending.discard(request_id)
                continue
            self.follower.forget(self.producer.by_request[request_id])
            self.producer.reported(request_id)

    def reply_of(self, request: Any) -> dict[str, Any] | None:
        """What the HTTP reply of a finished request carries in `kv_transfer_params`; asked once, after `finished`."""
        result = self.reuse.result(request.request_id)
        return None if result is None else {TICKET_KEY: result}

    def has_news(self) -> bool:
        """Whether an engine without requests must take a step all the same."""
        return bool(self.heard or self.gone) or self.reuse.retention.due(time.monotonic())

    def keep_time(self) -> None:
        """Called a few times a second by the link: wake an idle engine that has something to let go."""
        if self.reuse.retention.due(time.monotonic()):
            self.handle.wake_idle()

    def finished(self, request: Any, block_ids: BlockIds) -> bool:
        """vLLM's request has ended. True: its blocks stay until it is reported as sent."""
        known = self.tickets.forget(request.request_id)
        cached = self.follower.cached_tokens(request.request_id)
        if known is None:
            return False
        now_s = time.monotonic()
        ok = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        if known.ticket.role == "consume":
            self._consumer_finished(request, known, block_ids, now_s, ok=ok)
            return False
        self.reuse.let_go(request.request_id, "request_ended")
        if self.producer.transfer_of(request.request_id) is None:
            if not (self.producer.knows(known.key) or self.tickets.has(known.key)):  # another leg has it
                self._never_computed(known)
            return False
        if request.request_id in self.consumer.by_request:  # it still waits for its conversation's KV
            self._consumed(self.consumer.aborted(request.request_id, now_s))
            self._produced(self.producer.drop(request.request_id))
            return False
        groups = [list(group) for group in block_ids]
        self._produced(
            self.producer.finished(request.request_id, ok=ok, block_ids=groups, cached_tokens=cached, now_s=now_s)
        )
        return True

    # Inside.

    def _consumer_finished(self, request: Any, known: Ticketed, block_ids: BlockIds, now_s: float, *, ok: bool) -> None:
        ticket = known.ticket
        if ok and ticket.conversation and ticket.parts == 1:
            self.reuse.keep(request, ticket.conversation, block_ids[0], now_s)
        self._consumed(self.consumer.aborted(request.request_id, now_s))
        self._consumed(self.consumer.skip(known.key, ticket.producer_id, "ended before it was scheduled"))

    def _why_local(self, request: Any, known: Ticketed, computed: int) -> str:
        """Why decode computes the prompt itself; empty when it waits for a push."""
        left = len(request.prompt_token_ids) - computed
        if known.ticket.mode == "local":
            return "the router has asked for it"
        if self.consumer.knows(known.key):
            return "the ticket was used before"
        if left < self.settings.local_below_blocks * self.identity.block_size:
            return "the prefix is here already"
        if not self.link.connected:
            return "the bus is not connected"
        if self.peers.card(known.ticket.producer_id, known.ticket.producer_incarnation) is None:
            return f"prefill {known.ticket.producer_id} is not known here"
        return ""

    def _register(self, request: Any, known: Ticketed, block_ids: BlockIds, external: int, now_s: float) -> None:
        """Tell the matcher where the push goes."""
        producer = self.peers.card(known.ticket.producer_id)
        assert producer is not None
        token_count = len(request.prompt_token_ids)
        registration = push_of(self.identity, known, producer, block_ids, token_count, external)
        self._wait_for(registration, producer.tp_size, request.request_id, now_s)

    def _take_back(self, request: Any, ticket: Ticket, block_ids: BlockIds, external: int, now_s: float) -> None:
        """Register with the decode engine that holds the conversation."""
        claim = self.reuse.asked(request.request_id, external)
        holder = self.peers.card(claim.grant.holder_id)
        assert holder is not None
        registration = return_of(
            self.identity, ticket, claim, holder, block_ids, request.prompt_token_ids, self.settings.reuse_wait_s
        )
        self._wait_for(registration, holder.tp_size, request.request_id, now_s)

    def _wait_for(self, registration: BlocksRegistered, producer_tp: int, request_id: str, now_s: float) -> None:
        count = len(registration.block_ids[0])
        expect = Expect(registration.transfer_id, request_id, registration.first_block, count, producer_tp)
        self.orders.expected.append(expect)
        self._consumed(self.consumer.register(registration, request_id, now_s))

    def _gain(self, request: Any, computed: int) -> int:
        """Tokens that prefill takes back from the decode engine that holds the conversation."""
        claim = self.reuse.claims.get(request.request_id)
        if claim is None or self.consumer.knows(claim.grant.transfer_id):
            return 0
        grant = claim.grant
        if self.peers.card(grant.holder_id, grant.holder_incarnation) is None:
            self.reuse.holder_gone(request.request_id)
            return 0
        return self.reuse.gain(request.request_id, computed)

    def _pressed(self, output: Any) -> bool:
        """Whether requests could not be scheduled for want of blocks."""
        scheduler = self.handle.scheduler
        if output.preempted_req_ids:
            return True
        if scheduler is None or output.scheduled_new_reqs or not len(scheduler.waiting):
            return False
        return bool(len(scheduler.running) < scheduler.max_num_running_reqs)

    def _never_computed(self, known: Ticketed) -> None:
        unavailable = BlocksUnavailable(
            transfer_id=known.key,
            producer_id=self.identity.engine_id,
            reason="aborted",
            detail="the prefill request ended before it was scheduled",
        )
        self.link.post([Post(to, unavailable) for to in dict.fromkeys((known.ticket.consumer_id or MATCHER, MATCHER))])

    def _listen(self, now_s: float) -> None:
        while self.gone:
            gone = self.gone.popleft()
            self._produced(self.producer.consumer_gone(*gone))
            self._consumed(self.consumer.producer_gone(*gone, now_s))
        while self.heard:
            message = self.heard.popleft()
            if isinstance(message, PushOrdered):
                self.producer.consumer_known(message.transfer_id, message.consumer_id, message.consumer_incarnation)
            self.reuse.hear(message, self.orders, now_s)
            self._consumed(self.consumer.receive(message, now_s))
            self._produced(self.producer.receive(message))
        if now_s - self.ticked_s >= TICK_S:
            self.ticked_s = now_s
            self._consumed(self.consumer.tick(now_s))
            self._produced(self.producer.tick(now_s))
            self.reuse.tick(self.orders, now_s)

    def _waits(self) -> bool:
        return bool(self.consumer.open or self.reuse.retention.serving) or self.producer.holding()

    def _consumed(self, steps: Steps) -> None:
        self.link.post(steps.posts)
        self.orders.concluded |= steps.conclude
        self.orders.hinted += steps.hinted

    def _produced(self, steps: ProducerSteps) -> None:
        self.link.post(steps.posts)
        self.orders.admitted += steps.admitted
        self.orders.held += steps.held
        self.orders.released += steps.released
        self.orders.dropped += steps.dropped
