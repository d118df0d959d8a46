"""Each message in one human phrase, with the facts that matter. Pure."""

from collections.abc import Callable
from typing import Any

from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    BlocksRemoved,
    BlocksStored,
    BlocksUnavailable,
    CacheAsked,
    CacheCleared,
    CancelOrdered,
    DrainOrdered,
    EngineCard,
    LoadReported,
    PromptHashed,
    PromptMapped,
    PushDone,
    PushFailed,
    PushOrdered,
    PushQuiesced,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
    TransferClosed,
)

KIB = 1024
TEN = 10
OTHERS_CHARS_MAX = 300


def phrase_of(message: AnyMessage) -> str:
    """What the message says, in one line."""
    return _PHRASES[type(message)](message)


def milliseconds(value: float) -> str:
    """`0.42 ms`, `12.3 ms`, `2.50 s`."""
    if value >= 10_000:  # noqa: PLR2004  (ten seconds)
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if value >= TEN else f"{value:.2f} ms"


def size(value: float) -> str:
    """`512 B`, `7.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < KIB or unit == "GiB":
            break
        value /= KIB
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """`1 block`, `3 blocks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """Somebody else's words, without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text[:OTHERS_CHARS_MAX])


def route_of(answer: RouteAnswered) -> str:
    """`early p0 -> d1`."""
    engines = " -> ".join(name for name in (answer.prefill_id, answer.decode_id) if name)
    return printable(f"{answer.mode} {engines}")


def _blocks(block_ids: list[list[int]]) -> str:
    most = max(map(len, block_ids), default=0)
    groups = f" in {len(block_ids)} groups" if len(block_ids) > 1 else ""
    return counted(most, "block") + groups


def _with(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _route_decided(m: RouteDecided) -> str:
    engines = " -> ".join(name for name in (m.prefill_id, m.decode_id or ("(later)" if m.mode == "deferred" else ""))
                          if name)  # fmt: skip
    again = f"attempt {m.attempt}" if m.attempt > 1 else ""
    why = printable(f"{m.policy}: {m.reason}" if m.reason else m.policy)
    return _with(
        f"{m.mode} {engines} ({why})",
        again,
        "canary" if m.canary else "",
        f"decided in {m.decided_us} us" if m.decided_us else "",
    )


def _request_served(m: RequestServed) -> str:
    ttft = f"first byte after {milliseconds(m.ttft_ms)}" if m.ttft_ms else "no byte sent"
    return _with(f"request {m.outcome}, HTTP {m.status}", ttft, f"{milliseconds(m.duration_ms)} in all", m.error)


def _blocks_registered(m: BlocksRegistered) -> str:
    start = f" from block {m.first_block}" if m.first_block else ""
    kind = "takes a conversation's KV into" if m.reuse else "holds"
    return f"{kind} {_blocks(m.block_ids)}{start} for {m.token_count} tokens, waits {m.lease_s:.0f} s"


def _blocks_ready(m: BlocksReady) -> str:
    cached = f"{m.cached_tokens} of them cached" if m.cached_tokens else ""
    took = f"computed in {milliseconds(m.computed_ms)}" if m.computed_ms else ""
    return _with(f"prefill finished: {_blocks(m.block_ids)}, {m.token_count} tokens", cached, took)


def _push_ordered(m: PushOrdered) -> str:
    kind = "conversation push" if m.reuse else "push"
    start = f" from block {m.first_block}" if m.first_block else ""
    return f"{kind} ordered: {_blocks(m.block_ids)}{start} into {m.consumer_id}, {m.lease_s:.1f} s left"


def _push_done(m: PushDone) -> str:
    rank = f"rank {m.rank + 1} of {m.ranks}: " if m.ranks > 1 else ""
    blocks = counted(sum(count for _, count in m.ranges), "block")
    rate = f"{size(m.bytes)} in {milliseconds(m.duration_ms)}, {counted(m.writes, 'write')}"
    tail = f"{size(m.tail_bytes)} after the last pass" if m.tail_bytes else ""
    return _with(f"{rank}wrote {blocks}", rate, tail, "" if m.ordered_before_ready else "order came after prefill")


def _transfer_closed(m: TransferClosed) -> str:
    waited = f"waited {milliseconds(m.waited_ms)}" if m.waited_ms else ""
    start = f"started {milliseconds(m.start_ms)} after the last notice" if m.start_ms else ""
    return _with(f"transfer {m.outcome}", m.reason, waited, start)


def _reuse_answered(m: ReuseAnswered) -> str:
    if m.grant is None:
        return f"no KV to reuse: {m.miss or 'unknown'}"
    return f"{m.grant.token_count} tokens can be taken back from {m.grant.holder_id}, {m.age_s:.1f} s old"


def _route_asked(m: RouteAsked) -> str:
    engines = f"of {counted(len(m.engines), 'engine')} within {milliseconds(m.deadline_ms)}"
    what = "a decode for" if m.part == "decode" else "where to send"
    return f"asks {what} {size(m.prompt_bytes)}, {engines}" + (" (shadow)" if m.shadow else "")


def _engine_card(m: EngineCard) -> str:
    return f"{m.role} with {m.model}: {m.num_blocks} blocks of {m.block_size}" + (", draining" if m.draining else "")


_PHRASES: dict[type[AnyMessage], Callable[[Any], str]] = {
    EngineCard: _engine_card,
    LoadReported: lambda m: (
        f"{m.running} running, {m.waiting} waiting, {m.free_blocks} of {m.total_blocks} blocks free"
    ),
    DrainOrdered: lambda m: _with("take no new requests", m.reason),
    RouteDecided: _route_decided,
    RequestServed: _request_served,
    RouteAsked: _route_asked,
    RouteAnswered: lambda m: _with(f"answers {route_of(m)}", printable(m.reason)),
    BlocksRegistered: _blocks_registered,
    BlocksReady: _blocks_ready,
    BlocksUnavailable: lambda m: f"blocks unavailable: {_with(m.reason, m.detail)}",
    PushOrdered: _push_ordered,
    PushDone: _push_done,
    PushFailed: lambda m: f"rank {m.rank} could not write: {_with(m.reason, m.detail)}",
    TransferClosed: _transfer_closed,
    CancelOrdered: lambda m: f"cancel: {m.reason}",
    PushQuiesced: lambda m: f"rank {m.rank + 1} of {m.ranks} is quiet ({m.state.replace('_', ' ')}): blocks may go",
    ReuseOffered: lambda m: f"keeps {m.block_count} blocks, {m.token_count} tokens, for {m.remaining_s:.0f} s",
    ReuseAsked: lambda m: "asks for the conversation's KV" + ("" if m.claim else ", without claiming it"),
    ReuseAnswered: _reuse_answered,
    ReuseReleased: lambda m: f"releases the conversation's KV: {m.reason}",
    ReuseWithdrawn: lambda m: f"no longer holds the conversation's KV: {m.reason}",
    BlocksStored: lambda m: f"cached {counted(len(m.block_hashes), 'block')}",
    BlocksRemoved: lambda m: f"evicted {counted(len(m.block_hashes), 'block')}",
    CacheCleared: lambda m: f"says again all {m.block_count} cached blocks" if m.restates else "cache cleared",
    CacheAsked: lambda m: _with("asks for the whole cache", m.reason),
    PromptHashed: lambda m: f"names the blocks of {m.token_count} tokens",
    PromptMapped: lambda m: f"learned the blocks of {counted(len(m.marks), 'beginning')}",
}
