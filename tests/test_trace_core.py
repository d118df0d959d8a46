"""Messages to stories, in tables: what became of a request and where its time went."""

from typing import Any

import msgspec
import pytest

from kvbus.trace.core import AmbiguousIdError, Line, Stage, line_of, matching, named, stories_of
from kvbus.trace.phrases import milliseconds, phrase_of, size
from kvbus_schemas import (
    KINDS,
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    LoadReported,
    PushDone,
    PushOrdered,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseGrant,
    ReuseOffered,
    ReuseReleased,
    RouteAnswered,
    RouteAsked,
    RouteDecided,
    TransferClosed,
    subjects,
)

T, U, R = "a" * 32, "ab" + "0" * 30, "c" * 32
START_S = 1_700_000_000.0


def line(at_ms: float, sender: str, to: str, message: AnyMessage) -> Line:
    """A line stored `at_ms` after the start; its number follows its time."""
    return line_of(
        int(at_ms * 1000), START_S + at_ms / 1000, subjects.subject_of(message, sender=sender, to=to), message
    )


def decided(transfer_id: str = T, **changes: Any) -> RouteDecided:
    facts: dict[str, Any] = {"request_id": "req-1", "mode": "early", "prefill_id": "p0", "decode_id": "d0"}
    return RouteDecided(transfer_id=transfer_id, policy="round_robin", reason="next", **(facts | changes))


def registered(transfer_id: str = T, **changes: Any) -> BlocksRegistered:
    facts: dict[str, Any] = {"producer_id": "p0", "consumer_id": "d0", "request_id": "req-1"}
    return BlocksRegistered(
        transfer_id=transfer_id, consumer_incarnation="1", block_ids=[[1, 2, 3]], first_block=1, token_count=60,
        prompt_digest="f", block_size=16, lease_s=30, **(facts | changes),
    )  # fmt: skip


def served(transfer_id: str = T, **changes: Any) -> RequestServed:
    facts: dict[str, Any] = {"request_id": "req-1", "mode": "early", "outcome": "completed", "status": 200}
    return RequestServed(transfer_id=transfer_id, **(facts | changes))


ORDERED = PushOrdered(
    transfer_id=T, producer_id="p0", consumer_id="d0", consumer_incarnation="1", block_ids=[[1, 2, 3]], first_block=1,
    token_count=60, prompt_digest="f", lease_s=29.9,
)  # fmt: skip
READY = BlocksReady(
    transfer_id=T, producer_id="p0", block_ids=[[4, 5, 6, 7]], token_count=60, prompt_digest="f", lease_s=30,
    computed_ms=51.25, cached_tokens=16,
)  # fmt: skip
DONE = PushDone(
    transfer_id=T, producer_id="p0", consumer_id="d0", rank=0, ranks=1, ranges=[(1, 2), (3, 1)], bytes=7 * 2**20,
    duration_ms=12.34, writes=2, tail_bytes=2**19,
)  # fmt: skip
CLOSED = TransferClosed(
    transfer_id=T, producer_id="p0", consumer_id="d0", outcome="completed", waited_ms=66.0, start_ms=0.5
)

HANDOFF = [
    line(0, "router-1", "all", decided(conversation=R)),
    line(4, "d0", "matcher", registered()),
    line(5, "matcher-1", "p0", ORDERED),
    line(60, "p0", "matcher", READY),
    line(64, "p0", "d0", DONE),
    line(66, "d0", "p0", CLOSED),
    line(66.5, "d0", "matcher", CLOSED),
    line(200, "router-1", "all", served(ttft_ms=80.0, duration_ms=210.0)),
]


def test_a_hand_off_becomes_one_story_with_what_a_list_shows() -> None:
    [story] = stories_of(HANDOFF)
    assert story.lines == HANDOFF
    assert (story.request_id, story.mode, story.prefill_id, story.decode_id) == ("req-1", "early", "p0", "d0")
    assert (story.outcome, story.status, story.ttft_ms, story.conversation) == ("completed", 200, 80.0, R)


def test_stages_split_the_time_to_first_byte() -> None:
    [story] = stories_of(HANDOFF)
    assert [Stage(stage.name, round(stage.at_ms, 2), round(stage.took_ms, 2)) for stage in story.stages()] == [
        Stage("routed", 0, 0),
        Stage("registered", 4, 4),
        Stage("ordered", 5, 1),
        Stage("prefill ready", 60, 55),
        Stage("last push done", 64, 4),
        Stage("closed", 66.5, 2.5),
        Stage("first byte", 70, 3.5),
    ]


def test_in_a_deferred_hand_off_prefill_is_ready_before_the_registration() -> None:
    lines = [line(0, "r", "all", decided(mode="deferred", decode_id="")), line(50, "p0", "matcher", READY),
             line(52, "r", "all", decided(mode="deferred")), line(60, "d0", "matcher", registered())]  # fmt: skip
    [story] = stories_of(lines)
    assert [stage.name for stage in story.stages()] == ["routed", "prefill ready", "registered"]
    assert story.decode_id == "d0"


def test_lines_may_come_in_any_order_and_be_cut_off() -> None:
    [story] = stories_of(reversed(HANDOFF))
    assert story.lines == HANDOFF
    [late] = stories_of(HANDOFF[3:])
    assert (late.transfer_id, late.outcome) == (T, "completed")


def test_the_parts_of_a_request_with_several_prompts_are_one_story() -> None:
    lines = [line(0, "r", "all", decided()), *(
        line(n, "d0", "matcher", registered(f"{T}-{digest}")) for n, digest in ((1, "aa"), (2, "bb"))
    )]  # fmt: skip
    [story] = stories_of(lines)
    assert len(story.lines) == 3
    assert named([story], f"{T}-aa") == [story]
    assert named([story], "aaa") == [story]


def test_a_reuse_belongs_to_the_dispatch_that_it_was_granted_to() -> None:
    lines = [
        line(0, "r", "reuse", ReuseAsked(conversation=R, request_id="req-1")),
        line(1, "reuse-1", "r", ReuseAnswered(conversation=R, miss="new")),
        line(2, "r", "all", decided(conversation=R)),
        line(3, "p0", "matcher", registered(U, producer_id="d0", consumer_id="p0", reuse=True)),
        line(4, "p0", "d0", TransferClosed(transfer_id=U, producer_id="d0", consumer_id="p0", outcome="completed")),
        line(9, "d0", "reuse", ReuseOffered(
            conversation=R, offer_id="o", offer_seq=1, engine_id="d0", block_count=1, block_size=16, token_count=9,
            chain=[], remaining_s=480,
        )),
    ]  # fmt: skip
    [story] = stories_of(lines)
    assert story.lines == lines
    assert (story.prefill_id, story.decode_id) == ("p0", "d0")
    assert named([story], U) == [story]


def test_a_grant_that_is_released_unused_belongs_to_its_dispatch() -> None:
    """No blocks are registered for it, so that only the answer tells whose it was."""
    grant = ReuseGrant(
        transfer_id=R, offer_id="o1", holder_id="d0", holder_incarnation="1", conversation="e" * 32, token_count=60,
        block_size=16, chain=[b"1"],
    )  # fmt: skip
    [story] = stories_of(
        [
            line(0, "router-1", "reuse", ReuseAsked(conversation="e" * 32, request_id="req-1")),
            line(1, "reuse-1", "router-1", ReuseAnswered(conversation="e" * 32, grant=grant)),
            line(2, "router-1", "all", decided()),
            line(3, "p0", "d0", ReuseReleased(conversation="e" * 32, offer_id="o1", transfer_id=R, reason="spare")),
        ]
    )
    assert [type(one.message) for one in story.lines] == [ReuseAsked, ReuseAnswered, RouteDecided, ReuseReleased]


def test_a_question_to_a_router_on_the_bus_belongs_to_its_request() -> None:
    ask = RouteAsked(ask_id="q", request_id="req-1", model="m", prompt_bytes=2048, engines=[], deadline_ms=5)
    answer = RouteAnswered(ask_id="q", prefill_id="p0", decode_id="d0")
    lines = [line(0, "r", "all", ask), line(1, "x", "r", answer), line(2, "r", "all", decided())]
    assert [len(story.lines) for story in stories_of(lines)] == [3]


def test_what_is_about_no_request_is_left_out() -> None:
    load = LoadReported(engine_id="p0", running=0, waiting=0, free_blocks=9, total_blocks=9)
    assert stories_of([line(0, "p0", "all", load)]) == []


@pytest.mark.parametrize(
    ("messages", "outcome"),
    [
        ([decided()], "open"),
        ([registered(), CLOSED], "completed"),
        ([registered(), CLOSED, msgspec.structs.replace(CLOSED, outcome="expired")], "expired"),
        ([CLOSED, served(outcome="cancelled", status=499)], "cancelled"),
        ([decided(), served(outcome="retried", status=0)], "retried"),
    ],
)
def test_the_outcome_is_what_the_client_got_else_how_the_worst_transfer_ended(
    messages: list[AnyMessage], outcome: str
) -> None:
    [story] = stories_of([line(n, "r", "all", message) for n, message in enumerate(messages)])
    assert story.outcome == outcome


TWO = [
    *HANDOFF,
    line(300, "r", "all", decided(U, request_id="req-2", prefill_id="p1")),
    line(310, "r", "all", served(U, request_id="req-2", outcome="failed", status=502, duration_ms=900.0)),
]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({}, ["req-2", "req-1"]),
        ({"engine_id": "p1"}, ["req-2"]),
        ({"engine_id": "d0"}, ["req-2", "req-1"]),
        ({"engine_id": "p9"}, []),
        ({"outcome": "failed"}, ["req-2"]),
        ({"slow_ms": 80}, ["req-2", "req-1"]),
        ({"slow_ms": 81}, ["req-2"]),
        ({"limit": 1}, ["req-2"]),
    ],
)
def test_a_list_is_newest_first_and_passes_every_filter(filters: dict[str, Any], found: list[str]) -> None:
    assert [story.request_id for story in matching(stories_of(TWO), **filters)] == found


def test_a_story_is_found_by_any_of_its_ids_and_by_unambiguous_beginnings() -> None:
    stories = stories_of(TWO)
    first, second = stories
    assert named(stories, "req-1") == named(stories, T) == named(stories, "aa") == named(stories, R[:5]) == [first]
    assert named(stories, "ab") == [second]
    assert named(stories, "zzz") == []
    with pytest.raises(AmbiguousIdError, match="'a' is the beginning of 2 ids"):
        named(stories, "a")
    with pytest.raises(AmbiguousIdError, match="req-1, req-2"):
        named(stories, "req")


def test_the_attempts_of_one_request_are_found_together() -> None:
    lines = [line(0, "r", "all", decided()), line(1, "r", "all", decided(U, attempt=2))]
    assert [story.attempt for story in named(stories_of(lines), "req-1")] == [1, 2]


PHRASES = [
    (decided(decided_us=42), "early p0 -> d0 (round_robin: next), decided in 42 us"),
    (decided(mode="deferred", decode_id="", attempt=2), "deferred p0 -> (later) (round_robin: next), attempt 2"),
    (registered(), "holds 3 blocks from block 1 for 60 tokens, waits 30 s"),
    (ORDERED, "push ordered: 3 blocks from block 1 into d0, 29.9 s left"),
    (READY, "prefill finished: 4 blocks, 60 tokens, 16 of them cached, computed in 51.2 ms"),
    (DONE, "wrote 3 blocks, 7.0 MiB in 12.3 ms, 2 writes, 512.0 KiB after the last pass"),
    (CLOSED, "transfer completed, waited 66.0 ms, started 0.50 ms after the last notice"),
    (CancelOrdered(transfer_id=T, reason="client_gone"), "cancel: client_gone"),
    (BlocksUnavailable(transfer_id=T, producer_id="p0", reason="aborted"), "blocks unavailable: aborted"),
    (
        served(ttft_ms=80.0, duration_ms=12_000.0),
        "request completed, HTTP 200, first byte after 80.0 ms, 12.0 s in all",
    ),
]


@pytest.mark.parametrize(("message", "phrase"), PHRASES)
def test_a_message_is_one_phrase_with_the_facts_that_matter(message: AnyMessage, phrase: str) -> None:
    assert phrase_of(message) == phrase


def test_every_kind_has_a_phrase() -> None:
    from kvbus.trace.phrases import _PHRASES

    assert set(_PHRASES) == set(KINDS)


@pytest.mark.parametrize(("value", "text"), [(0.123, "0.12 ms"), (12.34, "12.3 ms"), (12_345, "12.3 s")])
def test_durations_are_short(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (5 * 2**40, "5120.0 GiB")])
def test_sizes_are_short(value: float, text: str) -> None:
    assert size(value) == text
