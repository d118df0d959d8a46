"""The parts of a replay: reading, comparing, gaps, crossed messages, the presence of engines, the fitted model."""

import json
from typing import Any

import msgspec
import pytest

from kvbus.errors import ConfigError
from kvbus.replay import matcher
from kvbus.replay.compare import Decision, Outcome, differences, gaps_of, report_of
from kvbus.replay.fit import Point, fit, held_out_error_ms
from kvbus.replay.model import judge
from kvbus.replay.pace import Pace
from kvbus.replay.recording import Gone, Recording, read
from kvbus.replay.router import ask
from kvbus.router.policies import LeastLoaded
from kvbus.trace.core import Line
from kvbus.trace.export import jsonl
from kvbus.trace.presence import presence_of
from kvbus_schemas import (
    AnyMessage,
    BlocksRegistered,
    BlocksUnavailable,
    CancelOrdered,
    Candidate,
    EngineCard,
    LoadReported,
    PushOrdered,
    Role,
    RouteDecided,
    TransferClosed,
)

T = "a" * 32
ROLES: dict[str, Role] = {"p0": "prefill", "d0": "decode"}
CARDS = [
    EngineCard(engine_id=name, incarnation="1", role=role, model="m", http_url="", block_size=16, num_blocks=9)
    for name, role in ROLES.items()
]
REGISTERED = BlocksRegistered(
    transfer_id=T, producer_id="p0", producer_incarnation="1", consumer_id="d0", consumer_incarnation="1",
    block_ids=[[5, 6]], first_block=0, token_count=20, prompt_digest="f", block_size=16, lease_s=30.0, source="d0",
)  # fmt: skip
ORDERED = PushOrdered(
    transfer_id=T, producer_id="p0", producer_incarnation="1", consumer_id="d0", consumer_incarnation="1",
    block_ids=[[5, 6]], first_block=0, token_count=20, prompt_digest="f", lease_s=30.0, source="matcher-1", seq=7,
)  # fmt: skip
CANCELLED = CancelOrdered(transfer_id=T, reason="client_left", source="router-1")
CLOSED = TransferClosed(transfer_id=T, producer_id="p0", consumer_id="d0", outcome="cancelled", source="d0")
ABORTED = BlocksUnavailable(
    transfer_id=T, producer_id="p0", reason="aborted", detail="cancelled: client_left", source="matcher-1"
)

Said = tuple[float, str, str, AnyMessage]


def recorded(*said: Said, cards: list[EngineCard] = CARDS) -> Recording:
    """What an export of these (second, sender, receiver, message) is read as."""
    lines = [Line(number, *one) for number, one in enumerate(said, 1)]
    return read(jsonl(lines, presence_of(lines, cards)))


def report(recording: Recording) -> Any:
    return report_of(recording, matcher.replay(recording), matcher.replay)


REGISTRATION: Said = (100.0, "d0", "matcher", REGISTERED)
ORDER: Said = (100.001, "matcher-1", "p0", ORDERED)


def test_the_same_decision_again_is_no_difference() -> None:
    found = report(recorded(REGISTRATION, ORDER))
    assert (found.differences, found.decisions, found.inputs) == ([], 1, 3)


def test_repeats_and_envelopes_and_times_within_tolerance_count_for_nothing() -> None:
    again = msgspec.structs.replace(ORDERED, seq=99, sent_unix_us=5, lease_s=29.0)
    found = report(recorded(REGISTRATION, REGISTRATION, ORDER, (101.5, "matcher-1", "p0", again)))
    assert found.differences == []


def test_missing_extra_and_changed_decisions_are_told_apart() -> None:
    other = msgspec.structs.replace(ORDERED, block_ids=[[7, 8]])
    stray = msgspec.structs.replace(CANCELLED, source="matcher-1", reason="why")
    found = report(recorded(REGISTRATION, (100.001, "matcher-1", "p0", other), (100.1, "matcher-1", "d0", stray)))
    assert [(d.kind, type(d.decision.message).__name__, d.fields) for d in found.differences] == [
        ("changed", "PushOrdered", {"block_ids": ([[7, 8]], [[5, 6]])}),
        ("missing", "CancelOrdered", {}),
    ]
    assert [d.kind for d in report(recorded(REGISTRATION)).differences] == ["extra"]


def test_what_began_before_the_recording_is_set_aside() -> None:
    found = report(recorded(ORDER, (101.0, "d0", "p0", CLOSED)))
    assert (found.differences, found.before) == ([], 1)


def test_a_matcher_that_was_not_there_has_decided_nothing() -> None:
    other = msgspec.structs.replace(REGISTERED, transfer_id="b" * 32)
    last = msgspec.structs.replace(REGISTERED, transfer_id="c" * 32)
    found = report(
        recorded(
            REGISTRATION,
            ORDER,
            (105.0, "d0", "matcher", other),
            (107.0, "d0", "p0", msgspec.structs.replace(CLOSED, transfer_id="b" * 32)),
            (110.0, "d0", "matcher", last),
            (110.1, "matcher-2", "p0", msgspec.structs.replace(ORDERED, transfer_id="c" * 32)),
        )
    )
    assert (found.differences, found.unheard) == ([], 1)


def test_a_gap_is_from_the_last_word_of_one_process_to_the_first_of_the_next() -> None:
    assert gaps_of([(1, "a"), (5, "a"), (9, "b"), (20, "b")]) == [(5, 9)]
    assert gaps_of([(1, "a"), (5, "b"), (7, "a"), (9, "b"), (12, "c")]) == [(9, 12)]
    assert gaps_of([(1, "a"), (50, "a")]) == []
    assert gaps_of([]) == []


def test_messages_that_crossed_on_their_way_are_no_difference() -> None:
    found = report(
        recorded(REGISTRATION, (100.002, "router-1", "p0", CANCELLED), (100.004, "matcher-1", "d0", ABORTED))
    )
    assert (found.differences, found.crossed) == ([], 1)


def test_a_message_may_have_been_overtaken_by_several() -> None:
    again = msgspec.structs.replace(CANCELLED, reason="deadline", source="router-2")
    said = [(100.002, "router-1", "p0", CANCELLED), (100.003, "router-2", "p0", again)]
    late = msgspec.structs.replace(ABORTED, detail="cancelled: client_left")
    found = report(recorded(REGISTRATION, *said, (100.004, "matcher-1", "d0", late)))
    assert (found.differences, found.crossed) == ([], 1)


def test_messages_that_are_too_far_apart_have_not_crossed() -> None:
    found = report(recorded(REGISTRATION, (100.2, "router-1", "p0", CANCELLED), (100.204, "matcher-1", "d0", ABORTED)))
    assert sorted(difference.kind for difference in found.differences) == ["extra", "missing"]


def test_an_order_whose_lease_ends_elsewhere_is_a_difference() -> None:
    one = Decision(T, "p0", 100.0, ORDERED)
    other = Decision(T, "p0", 100.0, msgspec.structs.replace(ORDERED, lease_s=20.0))
    assert [found.fields for found in differences(Outcome([one], [other]))[0]] == [{"lease_end_s": (130.0, 120.0)}]


def test_an_engine_that_fell_silent_is_gone_a_card_lifetime_later() -> None:
    load = LoadReported(engine_id="d0", running=0, waiting=0, free_blocks=1, total_blocks=1, incarnation="1")
    alive = msgspec.structs.replace(load, engine_id="p0")
    said: list[Said] = [(at_s, "d0", "all", load) for at_s in (0.0, 2.0, 4.0)]
    said += [(float(at_s), "p0", "all", alive) for at_s in range(0, 30, 2)]
    said.sort(key=lambda one: one[0])
    found = recorded(*said, cards=CARDS[:1])
    gone = [event for event in found.events if event.message == Gone("d0")]
    assert [event.at_s for event in gone] == [10.0]
    assert {event.key for event in found.events if isinstance(event.message, EngineCard)} == {"p0", "d0"}


def test_a_restarted_engine_has_a_card_for_each_incarnation() -> None:
    load = LoadReported(engine_id="d0", running=0, waiting=0, free_blocks=1, total_blocks=1, incarnation="0")
    new = msgspec.structs.replace(load, incarnation="1")
    found = recorded(*((float(n), "d0", "all", load if n < 5 else new) for n in range(9)))
    cards = [event for event in found.events if isinstance(event.message, EngineCard) and event.key == "d0"]
    assert [(event.at_s, event.message.incarnation) for event in cards if isinstance(event.message, EngineCard)] == [
        (0.0, "0"),
        (5.0, "1"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("{", "line 1 is not of a trace"),
        ('{"seq":1,"unix_s":1,"subject":"a.b","message":null}', "no subject of the bus"),
        ('{"seq":1,"unix_s":1,"subject":"a","message":{"type":"Strange"}}', "line 1 is not of a trace"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_the_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read([text])


def test_speed_is_original_max_or_a_factor() -> None:
    assert Pace("max").wait_s(1e9) == 0
    pace = Pace("10")
    assert pace.wait_s(100.0) == 0
    assert pace.wait_s(101.0) == pytest.approx(0.1, abs=0.05)
    for wrong in ("fast", "0", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match="original, max, or a factor"):
            Pace(wrong)


def test_the_fit_finds_what_times_are_made_of() -> None:
    points = [Point(size, queue, 5 + 0.2 * size + 0.1 * queue) for size in (1, 10, 50) for queue in (0, 30, 70, 5)]
    assert fit(points) == pytest.approx((5, 0.2, 0.1), rel=1e-3)
    assert held_out_error_ms(points) < 0.1


def test_no_prompt_is_the_faster_for_being_longer() -> None:
    fitted = fit([Point(size, 0, 100 - size) for size in range(10)])
    assert fitted == pytest.approx((95.5, 0, 0))


def decided(prefill_id: str, scores: dict[str, float], request: int = 1) -> RouteDecided:
    candidates = [Candidate(engine_id="d0", role="decode", score=0.0, terms={"running": 0.0, "waiting": 0.0})]
    candidates += [
        Candidate(engine_id=name, role="prefill", score=score, terms={"running": score, "waiting": 0.0})
        for name, score in scores.items()
    ]
    return RouteDecided(
        transfer_id=f"{request:032x}", request_id=str(request), mode="early", prefill_id=prefill_id, decode_id="d0",
        policy="least_loaded", reason="least loaded; default", candidates=candidates,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "differing", "ties"), [({"p0": 0.0, "p1": -2.0}, 1, 0), ({"p0": -2.0, "p1": 0.0}, 0, 0)]
)
def test_a_policy_is_asked_again_with_what_it_knew(scores: dict[str, float], differing: int, ties: int) -> None:
    found = ask(recorded((1.0, "router-1", "all", decided("p1", scores))), lambda _: LeastLoaded())
    assert (len(found.differences), found.ties) == (differing, ties)


def test_equal_scores_are_a_tie_and_no_difference() -> None:
    said = [(float(n), "router-1", "all", decided("p0", {"p0": 0.0, "p1": 0.0}, n)) for n in range(4)]
    found = ask(recorded(*said), lambda _: LeastLoaded())
    assert found.differences == []
    assert found.ties > 0


def test_with_too_few_requests_nothing_is_estimated() -> None:
    assert judge(recorded((1.0, "router-1", "all", decided("p0", {"p0": 0.0}))), LeastLoaded()) is None


def test_an_export_reads_back_as_it_was() -> None:
    line = Line(3, 1.5, "d0", "matcher", REGISTERED)
    [text] = jsonl([line])
    assert set(json.loads(text)) == {"seq", "unix_s", "subject", "message"}
    [event] = read([text]).events
    assert (event.at_s, event.sender, event.to, event.message) == (1.5, "d0", "matcher", REGISTERED)
