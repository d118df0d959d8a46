"""Counting: a tally loses nothing, stages add up, an observer sees what is missing; and how long a trace is kept."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.engine.counting import Counting
from kvbus.metrics.catalogue import BY_NAME, STAGES
from kvbus.metrics.page import registry_of
from kvbus.metrics.tally import PENDING_MAX, Change, Tally, together
from kvbus.observer.core import GRACE_S, ObserverCore, process_of
from kvbus.trace import split
from kvbus.trace.core import Line, stories_of
from kvbus.trace.split import split_of
from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    DrainOrdered,
    PushDone,
    PushOrdered,
    RequestServed,
    ReuseAnswered,
    ReuseAsked,
    ReuseReleased,
    RouteDecided,
    TransferClosed,
    subjects,
)

TRANSFER = "a" * 32
CONVERSATION = "c" * 32
COUNTER, GAUGE, SECONDS = "kvbus_engine_transfers", "kvbus_engine_held_blocks", "kvbus_engine_handoff_seconds"


# Tally

Event = tuple[str, float]


def counted(tally: Tally, events: list[Event]) -> None:
    for kind, value in events:
        if kind == "counter":
            tally.add(COUNTER, "push", "completed", by=value)
        elif kind == "gauge":
            tally.put(GAUGE, value)
        else:
            tally.observe(SECONDS, value, "push")


EVENTS = st.lists(
    st.tuples(st.sampled_from(["counter", "gauge", "histogram"]), st.integers(0, 200).map(float)), max_size=30
)


@given(parts=st.lists(EVENTS, max_size=6))
def test_what_is_taken_in_parts_is_what_was_counted(parts: list[list[Event]]) -> None:
    """However often vLLM asks, and whatever it puts together, nothing is lost and nothing counts twice."""
    tally, sum_of_parts = Tally(), Change()
    for events in parts:
        counted(tally, events)
        sum_of_parts = together(sum_of_parts, tally.take())
    whole = Tally()
    counted(whole, [event for events in parts for event in events])
    expected = whole.take()
    assert sum_of_parts.get("counters", {}) == expected.get("counters", {})
    assert sum_of_parts.get("gauges", {}) == expected.get("gauges", {})
    assert sum_of_parts.get("histograms", {}) == expected.get("histograms", {})
    assert tally.take() == {}


def test_a_tally_that_nobody_takes_from_stays_small_and_counts_on() -> None:
    tally = Tally()
    for _ in range(PENDING_MAX + 100):
        tally.observe(SECONDS, 0.001, "push")
    (values,) = tally.take()["histograms"].values()
    assert len(values) == PENDING_MAX
    (kept,) = tally.histograms()
    assert sum(kept.counts) == PENDING_MAX + 100


def test_a_page_has_cumulative_buckets_and_names_what_has_no_value_yet() -> None:
    from prometheus_client import generate_latest

    tally = Tally()
    for seconds in (0.0004, 0.0005, 0.3, 1000.0):
        tally.observe(SECONDS, seconds, "push")
    text = generate_latest(registry_of(tally.histograms, (BY_NAME[SECONDS], BY_NAME[COUNTER]), {"model_name": "m"}))
    page = text.decode().splitlines()
    assert 'kvbus_engine_handoff_seconds_bucket{kind="push",le="0.0005",model_name="m"} 2.0' in page
    assert 'kvbus_engine_handoff_seconds_bucket{kind="push",le="0.5",model_name="m"} 3.0' in page
    assert 'kvbus_engine_handoff_seconds_bucket{kind="push",le="+Inf",model_name="m"} 4.0' in page
    assert "# TYPE kvbus_engine_transfers_total counter" in page


def test_every_metric_is_named_after_its_process_and_its_unit() -> None:
    for metric in BY_NAME.values():
        assert metric.name.startswith("kvbus_")
        assert not metric.name.endswith("_total"), "the suffix is Prometheus's"
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert metric.name.endswith("_seconds") or metric.kind != "histogram"
        assert metric.text.endswith(".")
    assert split.STAGES == STAGES


# Engines

CLOSED: dict[str, Any] = {"transfer_id": TRANSFER, "producer_id": "p", "consumer_id": "d"}
DONE: dict[str, Any] = {**CLOSED, "rank": 0, "ranks": 1, "ranges": [(0, 3), (3, 1)], "bytes": 4096}


def values_of(counting: Counting) -> dict[str, float]:
    """By name, and labels with dots."""
    return {".".join((one.metric.name, *one.labels)): one.value for one in counting.tally.readings()}


def test_an_engine_counts_its_transfers_by_what_they_are_to_it() -> None:
    decode, prefill = Counting("decode"), Counting("prefill")
    for counting in (decode, prefill):
        counting.said(TransferClosed(**CLOSED, outcome="completed", waited_ms=20.0, start_ms=1.0))
        counting.said(TransferClosed(**CLOSED, outcome="completed", reason="the prefix is here already"))
        counting.said(TransferClosed(**CLOSED, outcome="expired", waited_ms=9.0))
        counting.said(PushDone(**DONE, duration_ms=2.0, handoff_ms=3.0))
    assert values_of(decode)["kvbus_engine_transfers.push.completed"] == 1
    assert values_of(decode)["kvbus_engine_transfers.push.skipped"] == 1
    assert values_of(decode)["kvbus_engine_transfers.push.expired"] == 1
    assert values_of(decode)["kvbus_engine_reuse_given_blocks"] == 4
    assert values_of(decode)["kvbus_engine_written_bytes.reuse"] == 4096
    assert values_of(prefill)["kvbus_engine_transfers.reuse.completed"] == 1
    assert values_of(prefill)["kvbus_engine_written_bytes.push"] == 4096
    assert "kvbus_engine_reuse_given_blocks" not in values_of(prefill)
    waits = {one.metric.name: sum(one.counts) for one in decode.tally.histograms()}
    assert waits["kvbus_engine_transfer_wait_seconds"] == 2
    assert waits["kvbus_engine_start_seconds"] == 1


def test_a_grant_is_counted_once_by_what_became_of_it() -> None:
    prefill = Counting("prefill")
    prefill.replied(None)
    prefill.replied({"kvbus": {"reused_tokens": 320, "reuse": "hit"}})
    prefill.replied({"kvbus": {"reused_tokens": 0, "reuse": "not needed"}})
    assert values_of(prefill) == {
        "kvbus_engine_reuse_claims.hit": 1,
        "kvbus_engine_reuse_claims.not_needed": 1,
        "kvbus_engine_reuse_taken_tokens": 320,
    }


# Stages


def turn(*, after_ms: float = 10.0, ttft_ms: float = 100.0, taken: bool = True) -> list[Line]:
    """A turn whose stages take 2 (wait), 3, 5, 10, 16, 29, 5 and 30 ms."""
    about: dict[str, Any] = {"conversation": CONVERSATION}
    push: dict[str, Any] = {
        **CLOSED, "consumer_incarnation": "i", "block_ids": [[1]], "first_block": 0, "token_count": 9,
        "prompt_digest": "x", "lease_s": 9.0,
    }  # fmt: skip
    back = "b" * 32
    said: list[tuple[float, str, AnyMessage]] = [
        (2, "router-1", ReuseAsked(request_id="r", **about)),
        (5, "reuse-1", ReuseAnswered(miss=None if taken else "new", **about)),
        (10, "router-1", RouteDecided(transfer_id=TRANSFER, request_id="r", mode="early", policy="p", reason="",
                                      after_ms=after_ms, decided_us=4000, **about)),
        (12, "d", BlocksRegistered(**push, block_size=32)),
        (13, "matcher-1", PushOrdered(**push)),
        (70, "p-r0", PushDone(**DONE, duration_ms=9.0, handoff_ms=5.0)),
        (71, "d", TransferClosed(**CLOSED, outcome="completed", waited_ms=59.0, start_ms=1.0)),
        (80, "p", BlocksReady(transfer_id=TRANSFER, producer_id="p", block_ids=[[1]], token_count=9,
                              prompt_digest="x", lease_s=9.0, computed_ms=60.0)),
        (130, "router-1", RequestServed(transfer_id=TRANSFER, request_id="r", mode="early", outcome="completed",
                                        status=200, ttft_ms=ttft_ms, duration_ms=120.0)),
    ]  # fmt: skip
    if taken:
        said += [
            (20.5, "p", BlocksRegistered(**push | {"transfer_id": back}, block_size=32, reuse=True, request_id="r")),
            (36, "p", TransferClosed(**CLOSED | {"transfer_id": back}, outcome="completed", waited_ms=15, start_ms=1)),
        ]
    said.sort(key=lambda one: one[0])
    return [Line(seq, 1000 + ms / 1000, sender, "all", message) for seq, (ms, sender, message) in enumerate(said, 1)]


def test_the_stages_of_a_turn_are_what_its_messages_say() -> None:
    (story,) = stories_of(turn())
    found = split_of(story)
    assert found is not None
    expected = [2, 3, 5, 10, 16, 29, 5, 30]
    assert [found.stages[name] for name in STAGES] == pytest.approx(expected, abs=1e-3)


@given(after_ms=st.floats(0, 500), ttft_ms=st.floats(0.1, 1000), taken=st.booleans())
def test_the_stages_add_up_and_none_is_negative(after_ms: float, ttft_ms: float, taken: bool) -> None:
    (story,) = stories_of(turn(after_ms=after_ms, ttft_ms=ttft_ms, taken=taken))
    found = split_of(story)
    assert found is not None
    assert tuple(found.stages) == STAGES
    assert min(found.stages.values()) >= -1e-6
    assert sum(found.stages.values()) == pytest.approx(ttft_ms, abs=1e-3)


@pytest.mark.parametrize("missing", [RouteDecided, BlocksReady, RequestServed])
def test_a_request_of_which_too_little_is_known_is_not_split(missing: type[AnyMessage]) -> None:
    stories = stories_of([line for line in turn() if not isinstance(line.message, missing)])
    assert [split_of(story) for story in stories] == [None] * len(stories)


# The observer


def test_an_observer_splits_a_request_once_it_is_over() -> None:
    tally = Tally()
    core = ObserverCore(tally)
    lines = turn()
    for line in lines:
        core.hear(line)
    core.tick(lines[-1].at_s + GRACE_S - 0.01)
    assert not list(tally.histograms()), "the last word may still come"
    for _ in range(2):
        core.tick(lines[-1].at_s + GRACE_S)
    found = {one.labels: one for one in tally.histograms() if one.metric.name == "kvbus_observer_stage_seconds"}
    assert {labels[0] for labels in found} == set(STAGES)
    assert found[("reuse_take",)].total == pytest.approx(0.016, abs=1e-5)
    assert {sum(one.counts) for one in found.values()} == {1}
    assert core.stories == 0


def test_an_observer_sees_what_senders_counted_and_nobody_got() -> None:
    tally = Tally()
    core = ObserverCore(tally)
    for number in (1, 2, 5, 5, 4, 6):
        word = ReuseReleased(
            conversation=CONVERSATION, offer_id="o", transfer_id="", reason="r",
            source="reuse-7f3a9c", incarnation="i", seq=number,
        )  # fmt: skip
        core.hear(Line(number, float(number), "reuse-7f3a9c", "decode-0", word))
    missing = {
        one.labels: one.value for one in tally.readings() if one.metric.name == "kvbus_observer_missing_messages"
    }
    assert missing[("reuse",)] == 2
    assert {labels for labels, value in missing.items() if value} == {("reuse",)}
    assert missing[("engine",)] == 0, "served from the start, so that the first one is an increase"


def test_names_of_processes_become_few_labels() -> None:
    assert [process_of(name) for name in ("router-7f3a9c", "matcher-0", "prefill-0", "prefill-0-r1", "x")] == [
        "router", "matcher", "engine", "engine", "engine",
    ]  # fmt: skip


# Retention


async def kept(bus: Bus) -> dict[str, Any]:
    info = await bus._jetstream.info(subjects.TRACE_STREAM)
    assert info is not None
    config: dict[str, Any] = info["config"]
    return config


@pytest.mark.nats
async def test_the_trace_is_kept_by_age_and_size_as_the_settings_say(nats_server: EmbeddedNats) -> None:
    settings = BusSettings(nats=nats_server.url, trace_max_age_s=3600, trace_max_bytes=300_000)
    bus = await Bus.connect(settings, name="first", incarnation="i")
    config = await kept(bus)
    assert (config["max_age"], config["max_bytes"]) == (3600 * 10**9, 300_000)
    word = DrainOrdered(engine_id="e", reason="x" * 4000)
    for _ in range(150):
        await bus.publish(word, "e")
    await bus.barrier()
    state: dict[str, Any] = {}
    for _ in range(100):
        info = await bus._jetstream.info(subjects.TRACE_STREAM)
        state = info["state"] if info else {}
        if state["last_seq"] >= 150:
            break
        await asyncio.sleep(0.05)
    assert state["bytes"] <= 300_000
    assert state["first_seq"] > 1, "the oldest went"
    await bus.close()


@pytest.mark.nats
async def test_changed_settings_of_the_trace_are_applied_by_whoever_comes_next(nats_server: EmbeddedNats) -> None:
    settings = BusSettings(nats=nats_server.url, trace_max_age_s=3600, trace_max_bytes=300_000)
    first = await Bus.connect(settings, name="first", incarnation="i")
    changed = msgspec.structs.replace(settings, trace_max_age_s=60, trace_max_bytes=200_000)
    second = await Bus.connect(changed, name="second", incarnation="i")
    third = await Bus.connect(BusSettings(nats=nats_server.url), name="third", incarnation="i")
    config = await kept(third)
    assert (config["max_age"], config["max_bytes"]) == (60 * 10**9, 200_000), "who has no wish changes nothing"
    for bus in (first, second, third):
        await bus.close()
