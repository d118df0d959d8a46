"""Reuse inside an engine, both roles: decode keeps and serves, prefill compares and takes.

Decode holds references on the blocks in vLLM's block pool, never `delay_free`, which would keep the loop turning.
Prefill's request is then consumer (of the old part) and producer (of the new one) at once; the two have different
transfer ids and never meet.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import structlog

from kvbus.engine.chain import tokens_in_common
from kvbus.engine.facts import SERVED, Progress, StepOrders, Terms, blocks_for
from kvbus.engine.identity import Identity
from kvbus.engine.link import Link
from kvbus.engine.retention import Freed, Retention
from kvbus.engine.settings import EngineSettings
from kvbus_schemas import BlocksUnavailable, Message, Post, PushOrdered, ReuseGrant, ReuseReleased, Ticket

log = structlog.get_logger()

LOW_WATER = 0.1
"""Offers yield, oldest first, when a smaller share of the engine's blocks than this is free."""


@dataclass
class Claim:
    """A grant that came with one of prefill's requests."""

    grant: ReuseGrant
    common: int
    """Leading tokens of the prompt that the offer has, at most all but one."""
    outcome: str = ""
    taken: int = 0
    """Tokens that were taken over."""
    why: str = "not_needed"
    """The reason to give if it is not used: prefill has it, or nearly all of it, in its own cache."""

    @property
    def is_open(self) -> bool:
        return self.outcome in ("", "asked")


class ReuseSide:
    """One engine's part in reuse."""

    def __init__(self, identity: Identity, settings: EngineSettings, link: Link) -> None:
        self.identity, self.settings, self.link = identity, settings, link
        self.pool: Any = None
        self.claims: dict[str, Claim] = {}
        self.quiet_ranks: Counter[str] = Counter()
        self.wanted_until_s: dict[str, float] = {}
        """Of the transfers that are served: when their consumer waits no longer."""
        self.retention = Retention(
            identity.engine_id,
            identity.incarnation,
            block_size=identity.block_size,
            ttl_s=settings.reuse_ttl_s,
            blocks_max=int(identity.num_blocks * settings.reuse_blocks_max),
        )

    # Decode keeps.

    def keep(self, request: Any, conversation: str, block_ids: list[int], now_s: float) -> None:
        """A turn has ended: hold its blocks and offer them."""
        count = request.num_computed_tokens
        if count < self.settings.reuse_min_tokens or self.pool is None or not _plain(request):
            return
        kept = list(block_ids[: blocks_for(count, self.identity.block_size)])
        self.pool.touch([self.pool.blocks[block_id] for block_id in kept])
        self.retention.compat_hash = self.identity.compat_hash
        self._give_back(self.retention.keep(conversation, request.all_token_ids[:count], kept, now_s))

    def make_room(self, *, pressed: bool) -> None:
        """Let the oldest offers go while few blocks are free, or while somebody could not be scheduled."""
        if not self.retention.offers:
            return
        low = int(self.identity.num_blocks * LOW_WATER)
        while pressed or self.pool.get_num_free_blocks() < low:
            freed = self.retention.evict_oldest()
            if not freed.block_ids:
                return
            self._give_back(freed)
            pressed = False

    def tick(self, orders: StepOrders, now_s: float) -> None:
        """What has expired goes; ranks stop with what nobody waits for any more, who may have died without a word."""
        self._give_back(self.retention.tick(now_s))
        for transfer_id in [each for each, until_s in self.wanted_until_s.items() if now_s >= until_s]:
            del self.wanted_until_s[transfer_id]
            orders.released.append(transfer_id)

    # Decode serves.

    def concerns(self, message: Message) -> bool:
        """Whether an idle engine must wake for a message: prefill waits for the word that an offer is gone, too."""
        if isinstance(message, PushOrdered):
            return message.reuse
        return isinstance(message, ReuseReleased) and bool(self.retention.offers)

    def hear(self, message: Message, orders: StepOrders, now_s: float) -> None:
        """An order to write an offer, or the word that nobody wants it."""
        if isinstance(message, ReuseReleased):
            self._give_back(self.retention.release(message.offer_id))
        elif isinstance(message, PushOrdered) and message.reuse:
            self._serve(message, orders, now_s)

    def _serve(self, order: PushOrdered, orders: StepOrders, now_s: float) -> None:
        if order.transfer_id in self.retention.serving or order.transfer_id in self.retention.served:
            return
        held = self.retention.order(order.offer_id, order.transfer_id, order.token_count, now_s)
        if held is None:
            unavailable = BlocksUnavailable(
                transfer_id=order.transfer_id,
                producer_id=self.identity.engine_id,
                reason="unknown",
                detail=f"offer {order.offer_id} is not held here (any more)",
            )
            self.link.post([Post(order.consumer_id, unavailable)])
            return
        name = SERVED + order.transfer_id
        orders.admitted.append(Terms(order.transfer_id, name, order.token_count, order.prompt_digest))
        ready = blocks_for(order.token_count, self.identity.block_size)
        orders.progress.append(Progress(order.transfer_id, name, tuple(held.block_ids), 0, ready, final=True))
        orders.held.append(order.transfer_id)
        self.wanted_until_s[order.transfer_id] = now_s + order.lease_s

    def quiet(self, transfer_ids: Counter[str]) -> None:
        """Ranks have reported transfers as quiet; when all have, the blocks go back."""
        self.quiet_ranks.update(transfer_ids)
        for transfer_id, ranks in list(self.quiet_ranks.items()):
            if ranks >= self.identity.tp_size:
                del self.quiet_ranks[transfer_id]
                self.wanted_until_s.pop(transfer_id, None)
                self._give_back(self.retention.quiet(transfer_id))

    def _give_back(self, freed: Freed) -> None:
        if freed.block_ids:
            self.pool.free_blocks(self.pool.blocks[block_id] for block_id in reversed(freed.block_ids))
        self.link.post(freed.posts)

    # Prefill takes.

    def claim(self, request: Any, ticket: Ticket) -> None:
        """A ticket brings a grant: how much of the prompt is it?"""
        grant = ticket.reuse
        if grant is None:
            return
        tokens = request.prompt_token_ids
        common = tokens_in_common(grant.conversation, grant.chain, grant.token_count, grant.block_size, tokens)
        claim = self.claims[request.request_id] = Claim(grant, min(common, len(tokens) - 1))
        if grant.block_size != self.identity.block_size or not _plain(request):
            claim.common, claim.why = 0, "incompatible"
        elif claim.common < self.settings.reuse_min_tokens:
            claim.why = "changed" if len(tokens) > self.settings.reuse_min_tokens else "too_short"

    def gain(self, request_id: str, computed: int) -> int:
        """Tokens beyond `computed` that taking the offer would save; 0 when it is not worth a transfer."""
        claim = self.claims.get(request_id)
        if claim is None or claim.outcome:
            return 0
        gain = claim.common - computed
        if gain < self.settings.reuse_min_tokens:
            return 0
        if not self.link.connected:
            claim.why = "unavailable"
            return 0
        return gain

    def holder_gone(self, request_id: str) -> None:
        """Whoever holds the offer is not on the bus any more."""
        self.claims[request_id].why = "engine_gone"

    def asked(self, request_id: str, external: int) -> Claim:
        """The claim is being used, for `external` tokens."""
        claim = self.claims[request_id]
        claim.outcome, claim.taken = "asked", external
        return claim

    def ended(self, request_id: str, transfer_id: str, *, completed: bool) -> None:
        """The transfer that a claim began has ended."""
        claim = self.claims.get(request_id)
        if claim is None or claim.grant.transfer_id != transfer_id:
            return
        claim.outcome = "hit" if completed else "unavailable"
        claim.taken = claim.taken if completed else 0

    def let_go(self, request_id: str, reason: str = "") -> None:
        """The claim is not used: its holder may free at once. Said at most once; without a `reason`, the one that
        was found."""
        claim = self.claims.get(request_id)
        if claim is None or claim.outcome:
            return
        reason = reason or claim.why
        claim.outcome = reason
        if any(other.grant.transfer_id == claim.grant.transfer_id and other.is_open for other in self.claims.values()):
            return  # the same ticket came twice, and the other request uses it
        released = ReuseReleased(
            conversation=claim.grant.conversation,
            offer_id=claim.grant.offer_id,
            transfer_id=claim.grant.transfer_id,
            reason=reason,
        )
        self.link.post([Post(claim.grant.holder_id, released)])

    def result(self, request_id: str) -> dict[str, Any] | None:
        """What became of the claim, for the router's reply."""
        claim = self.claims.pop(request_id, None)
        if claim is None:
            return None
        return {"reused_tokens": claim.taken, "reuse": claim.outcome}


def _plain(request: Any) -> bool:
    """Whether the tokens say all there is to say about the KV: two images share their placeholder tokens, and an
    adapter changes the KV of the same tokens."""
    return not getattr(request, "mm_features", None) and getattr(request, "lora_request", None) is None
