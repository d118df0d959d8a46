"""What an engine counts: out of what it says on the bus, so that no hook has to, and what is so at this moment."""

import time
from typing import Any, Protocol

from kvbus.engine.identity import Identity
from kvbus.metrics.page import bus_totals
from kvbus.metrics.tally import Tally
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    Message,
    PushDone,
    PushFailed,
    ReuseOffered,
    ReuseWithdrawn,
    Role,
    TransferClosed,
)
from kvbus_schemas.ticket import TICKET_KEY

PUSH, REUSE = "push", "reuse"


class Counting:
    """One process of an engine: its scheduler, or a rank. `said` is called with every message that it posts."""

    def __init__(self, role: Role) -> None:
        self.tally = Tally()
        self._consumed = PUSH if role == "decode" else REUSE
        self._produced = PUSH if role == "prefill" else REUSE

    def said(self, message: Message) -> None:
        """Count what the engine says."""
        match message:
            case BlocksRegistered():
                self.tally.add("kvbus_engine_registrations", self._consumed)
            case TransferClosed():
                self._closed(message)
            case BlocksReady():
                self._ready(message)
            case PushDone():
                self._pushed(message)
            case PushFailed():
                self.tally.add("kvbus_engine_write_failures", message.reason)
            case BlocksUnavailable():
                self.tally.add("kvbus_engine_unavailable", message.reason)
            case CancelOrdered():
                self.tally.add("kvbus_engine_cancels")
            case ReuseOffered():
                self.tally.add("kvbus_engine_offers")
                self.tally.add("kvbus_engine_offered_tokens", by=message.token_count)
            case ReuseWithdrawn():
                self.tally.add("kvbus_engine_withdrawals", message.reason)
            case _:
                pass

    def replied(self, params: dict[str, Any] | None) -> None:
        """Count what became of a grant, as prefill's reply tells the router."""
        told = (params or {}).get(TICKET_KEY)
        if told is not None:
            self.tally.add("kvbus_engine_reuse_claims", (told["reuse"] or "unused").replace(" ", "_"))
            self.tally.add("kvbus_engine_reuse_taken_tokens", by=told["reused_tokens"])

    def _closed(self, closed: TransferClosed) -> None:
        skipped = closed.outcome == "completed" and not closed.waited_ms
        self.tally.add("kvbus_engine_transfers", self._consumed, "skipped" if skipped else closed.outcome)
        if closed.waited_ms:
            self.tally.observe("kvbus_engine_transfer_wait_seconds", closed.waited_ms / 1e3, self._consumed)
        if closed.start_ms:
            self.tally.observe("kvbus_engine_start_seconds", closed.start_ms / 1e3, self._consumed)

    def _ready(self, ready: BlocksReady) -> None:
        self.tally.observe("kvbus_engine_prefill_seconds", ready.computed_ms / 1e3)
        self.tally.add("kvbus_engine_prefill_tokens", "cache", by=ready.cached_tokens)
        self.tally.add("kvbus_engine_prefill_tokens", "computed", by=max(ready.token_count - ready.cached_tokens, 0))

    def _pushed(self, done: PushDone) -> None:
        tally, kind = self.tally, self._produced
        tally.observe("kvbus_engine_handoff_seconds", done.handoff_ms / 1e3, kind)
        tally.observe("kvbus_engine_write_seconds", done.duration_ms / 1e3, kind)
        tally.add("kvbus_engine_written_bytes", kind, by=done.bytes)
        tally.add("kvbus_engine_tail_bytes", kind, by=min(done.tail_bytes, done.bytes))
        tally.add("kvbus_engine_writes", kind, by=done.writes)
        if kind == REUSE and done.rank == 0:
            tally.add("kvbus_engine_reuse_given_blocks", by=sum(count for _, count in done.ranges))


class Linked(Protocol):
    """What is read of a link (`kvbus.engine.link`)."""

    bus: Any
    state: Any

    @property
    def waiting(self) -> int: ...

    @property
    def connected(self) -> bool: ...


def look_at_link(tally: Tally, link: Linked) -> None:
    """What the bus connection has counted."""
    if link.bus is not None:
        for name, value in bus_totals(link.bus.counters).items():
            tally.total(name, value)
    tally.total("kvbus_engine_posts_dropped", link.state.dropped)


def look_at_scheduler(tally: Tally, me: Identity, link: Linked, side: Any) -> None:
    """What a scheduler waits for and holds; a few integers, each right for itself, from any thread."""
    look_at_link(tally, link)
    retention = side.reuse.retention
    tally.put("kvbus_engine_info", 1, me.engine_id, me.role, me.incarnation)
    tally.put("kvbus_bus_connected", int(link.connected))
    tally.put("kvbus_engine_posts_waiting", link.waiting)
    tally.put("kvbus_engine_presence_age_seconds", round(max(time.monotonic() - link.state.own_card_s, 0.0)))
    tally.put("kvbus_engine_waiting_transfers", len(side.consumer.open))
    tally.put("kvbus_engine_producing_transfers", len(side.producer.open))
    tally.put("kvbus_engine_held_blocks", retention.blocks)
    tally.put("kvbus_engine_held_conversations", len(retention.offers))
