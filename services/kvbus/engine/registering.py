"""What a consumer says when it registers: the destination of a push, or of a conversation's return."""

from typing import Any

from kvbus.engine.facts import blocks_for, prompt_digest
from kvbus.engine.identity import Identity
from kvbus.engine.reuse_side import Claim
from kvbus.engine.tickets import Ticketed
from kvbus_schemas import BlocksRegistered, EngineCard, Ticket

BlockIds = tuple[list[int], ...]


def push_of(
    me: Identity, known: Ticketed, producer: EngineCard, block_ids: BlockIds, token_count: int, external: int
) -> BlocksRegistered:
    """Decode wants the last `external` of the prompt's `token_count` tokens from its prefill."""
    return BlocksRegistered(
        transfer_id=known.key,
        token_count=token_count,
        prompt_digest=known.digest,
        lease_s=known.ticket.deadline_s,
        **_ends(me, known.ticket, producer, block_ids, token_count - external, token_count),
    )


def return_of(
    me: Identity,
    ticket: Ticket,
    claim: Claim,
    holder: EngineCard,
    block_ids: BlockIds,
    prompt: list[int],
    wait_s: float,
) -> BlocksRegistered:
    """Prefill wants a conversation's blocks back from the decode engine that holds them: the roles swapped."""
    grant, count = claim.grant, claim.common
    return BlocksRegistered(
        transfer_id=grant.transfer_id,
        token_count=count,
        prompt_digest=prompt_digest(grant.transfer_id, prompt, count),
        lease_s=min(ticket.deadline_s, wait_s),
        reuse=True,
        offer_id=grant.offer_id,
        **_ends(me, ticket, holder, block_ids, count - claim.taken, count),
    )


def _ends(
    me: Identity, ticket: Ticket, producer: EngineCard, block_ids: BlockIds, have: int, count: int
) -> dict[str, Any]:
    """Who from, who to, and the blocks for tokens `have` to `count`."""
    first = have // me.block_size
    return {
        "producer_id": producer.engine_id,
        "producer_incarnation": producer.incarnation,
        "producer_lease": producer.lease,
        "consumer_id": me.engine_id,
        "consumer_incarnation": me.incarnation,
        "block_ids": [list(group[first : blocks_for(count, me.block_size)]) for group in block_ids],
        "first_block": first,
        "block_size": me.block_size,
        "compat_hash": me.compat_hash,
        "consumer_tp_size": me.tp_size,
        "request_id": ticket.request_id,
        "trace_id": ticket.trace_id,
        "span_id": ticket.span_id,
    }
