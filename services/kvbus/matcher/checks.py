"""What makes a registration valid. Every refusal names both values that should have been equal."""

from typing import NamedTuple

import msgspec

from kvbus_schemas import BlocksReady, BlocksRegistered, BlocksUnavailable, EngineCard, PushOrdered
from kvbus_schemas.transfer import UnavailableReason


class Refusal(NamedTuple):
    """Why a registration cannot be served: a short code for metrics, a text for people."""

    code: str
    text: str


def check_alone(registration: BlocksRegistered, left_s: float) -> Refusal | None:
    """What must hold whoever the engines are. `left_s` is what remains of the lease."""
    if left_s <= 0:
        return Refusal("lease", f"the lease is over: {left_s:.3f} s were left, it must be above 0 s")
    if registration.producer_id == registration.consumer_id:
        return Refusal("self", f"producer and consumer are both {registration.producer_id!r}: they must differ")
    if registration.token_count <= 0 or registration.block_size <= 0 or registration.first_block < 0:
        return Refusal(
            "block_count",
            f"token_count is {registration.token_count}, block_size {registration.block_size} and first_block "
            f"{registration.first_block}: they must be at least 1, 1 and 0",
        )
    return _check_counts(registration)


def _check_counts(registration: BlocksRegistered) -> Refusal | None:
    wanted = -(-registration.token_count // registration.block_size) - registration.first_block
    for group, block_ids in enumerate(registration.block_ids or [[]]):
        if len(block_ids) != wanted:
            return Refusal(
                "block_count",
                f"group {group} registers {len(block_ids)} blocks, but {registration.token_count} tokens in blocks of "
                f"{registration.block_size} from block {registration.first_block} need {wanted}",
            )
    return None


def check_pair(registration: BlocksRegistered, producer: EngineCard, consumer: EngineCard) -> Refusal | None:
    """The two engines' blocks must mean the same bytes."""
    here, there = f"consumer {consumer.engine_id!r}", f"producer {producer.engine_id!r}"
    if consumer.model != producer.model:
        return Refusal("model", f"models differ: {here} has {consumer.model!r}, {there} has {producer.model!r}")
    for size, who in ((consumer.block_size, f"{here}'s card"), (producer.block_size, there)):
        if registration.block_size != size:
            text = f"block sizes differ: the registration of {here} says {registration.block_size}, {who} has {size}"
            return Refusal("block_size", text)
    ours = registration.compat_hash or consumer.compat_hash
    if ours != producer.compat_hash:
        text = f"compatibility hashes differ: {here} has {ours!r}, {there} has {producer.compat_hash!r}"
        return Refusal("compat_hash", text + " (model, dtype, attention backend and versions must be equal)")
    return None


def check_ready(registration: BlocksRegistered, ready: BlocksReady) -> Refusal | None:
    """Producer and consumer must speak of the same tokens and of each other."""
    pairs = (
        ("producer", registration.producer_id, ready.producer_id),
        ("consumer", registration.consumer_id, ready.consumer_id or registration.consumer_id),
        ("token_count", registration.token_count, ready.token_count),
        ("prompt_digest", registration.prompt_digest, ready.prompt_digest),
        ("block_size", registration.block_size, ready.block_size or registration.block_size),
    )
    for name, registered, computed in pairs:
        if registered != computed:
            code = "digest" if name == "prompt_digest" else name
            return Refusal(
                code, f"{name} differs: the consumer registered {registered!r}, the producer has {computed!r}"
            )
    return None


def check_repeat(first: BlocksReady, ready: BlocksReady) -> Refusal | None:
    """A second readiness, without a registration, must say what the first one said."""
    said, says = [(r.producer_id, r.token_count, r.prompt_digest, r.block_size) for r in (first, ready)]
    return None if said == says else Refusal("ready", f"two readinesses differ: first {said}, then {says}")


def same_facts(one: BlocksRegistered, other: BlocksRegistered) -> bool:
    """True if both say the same, whenever and however often they were sent."""
    return _facts(one) == _facts(other)


def _facts(registration: BlocksRegistered) -> BlocksRegistered:
    return msgspec.structs.replace(
        registration, source="", incarnation="", seq=0, sent_unix_us=0, trace_id="", span_id="", lease_s=0.0
    )


def unavailable_to(registration: BlocksRegistered, reason: UnavailableReason, detail: str) -> BlocksUnavailable:
    """The answer to a registration that cannot be served."""
    return BlocksUnavailable(
        transfer_id=registration.transfer_id,
        producer_id=registration.producer_id,
        reason=reason,
        detail=detail,
        trace_id=registration.trace_id,
        span_id=registration.span_id,
    )


def order_of(registration: BlocksRegistered, producer_incarnation: str, lease_s: float) -> PushOrdered:
    """The order that a valid registration becomes: for this incarnation of its producer, `lease_s` seconds left."""
    return PushOrdered(
        transfer_id=registration.transfer_id,
        producer_id=registration.producer_id,
        producer_incarnation=producer_incarnation,
        producer_lease=registration.producer_lease,
        consumer_id=registration.consumer_id,
        consumer_incarnation=registration.consumer_incarnation,
        block_ids=registration.block_ids,
        first_block=registration.first_block,
        token_count=registration.token_count,
        prompt_digest=registration.prompt_digest,
        consumer_tp_size=registration.consumer_tp_size,
        lease_s=lease_s,
        reuse=registration.reuse,
        offer_id=registration.offer_id,
        trace_id=registration.trace_id,
        span_id=registration.span_id,
    )
