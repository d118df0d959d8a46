"""Questions to guests: what every answer leads to, when a guest rests, who belongs to a canary's share. Pure."""

from typing import Any

import pytest

from kvbus.errors import ConfigError
from kvbus.router.answers import REASON_CHARS_MAX, TERMS_MAX, choice_of
from kvbus.router.asking import ASKS_OPEN_MAX, NAMES_MAX, OTHER, PAST_MAX, SHADOWS_OPEN_MAX, Asks
from kvbus.router.basis import ENGINES_MAX, basis_of
from kvbus.router.breaker import BREAKER_FAILURES, BREAKER_REST_S, Breaker
from kvbus.router.canary import Canary, decoded, encoded
from kvbus.router.offered import Offered
from kvbus.router.policies import RouteChoice, RouteQuestion
from kvbus_schemas import Candidate, EngineView, Mode, RouteAnswered

OFFERED = Offered(prefills=("p0", "p1"), decodes=("d0", "d1"))
CHOSEN: tuple[Mode, str, str] = ("early", "p0", "d0")


def answer(ask_id: str = "q", source: str = "g", **given: Any) -> RouteAnswered:
    fields: dict[str, object] = {"ask_id": ask_id, "source": source, "prefill_id": "p1", "decode_id": "d1"}
    return RouteAnswered(**(fields | given))  # type: ignore[arg-type]


def asking(*ask_ids: str, guest: str = "g") -> Asks:
    asks = Asks()
    for ask_id in ask_ids or ("q",):
        assert asks.open(ask_id, guest, OFFERED, 0.0) is None
    return asks


def outcomes(asks: Asks, *answers: RouteAnswered) -> list[str]:
    return [asks.answered(one, 1.0).outcome for one in answers]


# Answers


def test_the_first_answer_of_the_guest_is_used_and_the_next_is_a_second_one() -> None:
    asks = asking()
    heard = asks.answered(answer(reason="because"), 0.25)
    assert (heard.outcome, heard.settles, heard.took_s) == ("used", True, 0.25)
    assert heard.choice == RouteChoice(mode="early", prefill_id="p1", decode_id="d1", reason="because")
    again = asks.answered(answer(), 0.5)
    assert (again.outcome, again.settles, again.choice) == ("second", False, None)


def test_an_answer_after_the_deadline_is_late_and_the_next_is_a_second_one() -> None:
    asks = asking()
    expired = asks.expired("q", 20.0, 0.02)
    assert expired is not None
    assert (expired.outcome, expired.settles, expired.why) == ("no_answer", True, "no answer within 20 ms")
    assert asks.expired("q", 20.0, 0.03) is None
    assert outcomes(asks, answer(), answer()) == ["late", "second"]


def test_somebody_elses_answer_changes_nothing() -> None:
    asks = asking()
    assert outcomes(asks, answer(source="thief"), answer(source=""), answer()) == ["stranger", "stranger", "used"]
    assert outcomes(asks, answer(source="thief")) == ["stranger"]


def test_an_answer_to_nobodys_question_is_a_stray() -> None:
    assert outcomes(Asks(), answer(), answer("other")) == ["stray", "stray"]


@pytest.mark.parametrize(
    ("offered", "given", "outcome"),
    [
        (OFFERED, {"decode_id": "d9"}, "unknown_engine"),
        (OFFERED, {"prefill_id": "d0"}, "unknown_engine"),
        (OFFERED, {"decode_id": ""}, "wrong"),
        (OFFERED, {"prefill_id": ""}, "wrong"),
        (OFFERED, {"mode": "local"}, "wrong"),
        (OFFERED, {"mode": "pull"}, "wrong"),
        (OFFERED, {"mode": "local", "prefill_id": ""}, "used"),
        (OFFERED, {"mode": "deferred", "decode_id": ""}, "used"),
        (Offered(prefills=("p1",), decodes=("d1",), asked="deferred"), {}, "wrong"),
        (Offered(prefills=("p1",), decodes=("d1",), asked="early"), {"mode": "local", "prefill_id": ""}, "wrong"),
        (Offered(prefills=("p1",), decodes=("d1",), asked="pull"), {"mode": "pull"}, "used"),
        (Offered(prefills=(), decodes=("d1",), asked="early"), {"mode": "local", "prefill_id": ""}, "used"),
        (Offered(prefills=(), decodes=("d1",), asked="deferred", second=True), {"prefill_id": ""}, "used"),
        (
            Offered(prefills=(), decodes=("d1",), asked="deferred", second=True),
            {"prefill_id": "", "decode_id": "", "mode": "deferred"},
            "wrong",
        ),
    ],
)
def test_an_answer_is_held_to_what_was_offered(offered: Offered, given: dict[str, Any], outcome: str) -> None:
    asks = Asks()
    asks.open("q", "g", offered, 0.0)
    heard = asks.answered(answer(**given), 0.0)
    assert (heard.outcome, heard.settles) == (outcome, True)


def test_garbage_of_the_guest_ends_its_question_and_that_of_others_does_not() -> None:
    asks = asking()
    assert asks.undecodable("q", "thief", 0.0).outcome == "stranger"
    assert asks.undecodable("unknown", "g", 0.0).outcome == "stray"
    heard = asks.undecodable("q", "g", 0.0)
    assert (heard.outcome, heard.settles) == ("undecodable", True)
    assert outcomes(asks, answer()) == ["second"]


def test_what_is_kept_of_an_answer_is_small_and_printable() -> None:
    nan = float("nan")
    candidates = [
        Candidate(engine_id="d0", role="decode", score=1.0, terms={"\x1b[31m" + "t" * 99: 1.0, "bad": nan}),
        Candidate(engine_id="d0", role="prefill", score=1.0),
        Candidate(engine_id="stranger", role="decode", score=9.0),
        Candidate(engine_id="d1", role="decode", score=nan),
        Candidate(engine_id="p0", role="prefill", score=0.0, terms={f"t{n}": 0.0 for n in range(99)}),
    ]
    choice = choice_of(answer(reason="\x1b[2J\n[red]" + "x" * 9999, candidates=candidates), OFFERED)
    assert choice.reason.startswith(" [2J [red]x")
    assert len(choice.reason) == REASON_CHARS_MAX
    assert [(one.engine_id, one.role) for one in choice.candidates] == [("d0", "decode"), ("p0", "prefill")]
    assert list(choice.candidates[0].terms) == [" [31m" + "t" * 27]
    assert len(choice.candidates[1].terms) == TERMS_MAX


# Limits


def test_only_so_many_questions_are_open_and_the_guest_is_not_blamed() -> None:
    asks = asking(*map(str, range(ASKS_OPEN_MAX)))
    refused = asks.open("one more", "g", OFFERED, 0.0)
    assert refused is not None
    assert refused.outcome == "unasked"
    asks.withdraw("0")
    assert asks.open("one more", "g", OFFERED, 0.0) is None
    assert not asks.resting["g"]


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    asks = Asks()
    for number in range(PAST_MAX + 1):
        asks.open(str(number), "g", OFFERED, 0.0)
        asks.answered(answer(str(number)), 0.0)
    assert outcomes(asks, answer("0"), answer("1")) == ["stray", "second"]


def test_names_of_strangers_do_not_fill_the_metrics() -> None:
    asks = asking()
    names = {asks.answered(answer(source=f"s{number}"), 0.0).guest for number in range(NAMES_MAX * 3)}
    assert OTHER in names
    assert len(names) == NAMES_MAX + 1


# Shadows


def shadowing(*to: str) -> Asks:
    asks = Asks()
    asks.shadow("q", frozenset(to), OFFERED, CHOSEN)
    return asks


def test_shadows_agree_or_differ_and_settle_nothing() -> None:
    asks = shadowing("a", "b", "c")
    same = {"prefill_id": "p0", "decode_id": "d0"}
    heard = [
        asks.answered(one, 0.0)
        for one in (answer(source="a", **same), answer(source="b"), answer(source="c", decode_id="d9"))
    ]
    assert [one.outcome for one in heard] == ["agreed", "differed", "unknown_engine"]
    assert all(one.shadow and not one.settles and one.choice is None for one in heard)
    assert outcomes(asks, answer(source="a"), answer(source="stranger")) == ["second", "stranger"]


def test_whoever_listens_may_shadow_where_all_are_asked_but_not_nameless() -> None:
    assert outcomes(shadowing(), answer(source="x"), answer(source="y"), answer(source="")) == [
        "differed", "differed", "stranger",
    ]  # fmt: skip


def test_questions_to_shadows_are_forgotten_oldest_first() -> None:
    asks = Asks()
    for number in range(SHADOWS_OPEN_MAX + 1):
        asks.shadow(str(number), frozenset("g"), OFFERED, CHOSEN)
    assert outcomes(asks, answer("0"), answer("1")) == ["stray", "differed"]


# Rest


def failing(asks: Asks, times: int, now_s: float) -> list[str]:
    turned: list[str] = []
    for number in range(times):
        assert asks.open(f"f{now_s}{number}", "g", OFFERED, now_s) is None
        heard = asks.expired(f"f{now_s}{number}", 20.0, now_s)
        assert heard is not None
        turned.append(heard.turned)
    return turned


def test_after_failures_in_a_row_a_guest_is_not_asked_for_a_while() -> None:
    asks = Asks()
    assert failing(asks, BREAKER_FAILURES, 0.0) == [""] * (BREAKER_FAILURES - 1) + ["rests"]
    refused = asks.open("q", "g", OFFERED, BREAKER_REST_S - 0.1)
    assert refused is not None
    assert (refused.outcome, refused.why) == ("resting", "it rests after 5 failures in a row")
    assert asks.open("other", "another guest", OFFERED, 0.0) is None


def test_one_question_at_a_time_tries_a_guest_that_rests_until_it_is_back() -> None:
    asks = Asks()
    failing(asks, BREAKER_FAILURES, 0.0)
    now_s = BREAKER_REST_S
    assert asks.open("try", "g", OFFERED, now_s) is None
    assert asks.open("beside", "g", OFFERED, now_s) is not None
    asks.expired("try", 20.0, now_s)
    assert asks.open("too soon", "g", OFFERED, now_s + BREAKER_REST_S - 0.1) is not None
    now_s += BREAKER_REST_S
    assert asks.open("again", "g", OFFERED, now_s) is None
    assert asks.answered(answer("again"), now_s).turned == "back"
    assert asks.open("q", "g", OFFERED, now_s) is None
    assert asks.resting == {"g": False}


def test_a_try_whose_client_leaves_does_not_lock_the_guest_out() -> None:
    asks = Asks()
    failing(asks, BREAKER_FAILURES, 0.0)
    assert asks.open("try", "g", OFFERED, BREAKER_REST_S) is None
    asks.withdraw("try")
    assert asks.open("next", "g", OFFERED, BREAKER_REST_S) is None


def test_a_success_between_failures_starts_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(BREAKER_FAILURES - 1):
            assert breaker.failed(0.0) is False
        assert breaker.worked() is False
    assert not breaker.resting


# Canary


def test_a_conversation_is_in_the_share_or_not_and_a_greater_share_keeps_it() -> None:
    small, great = Canary(guest="g", share=0.1), Canary(guest="g", share=0.3)
    conversations = [f"{number:032x}" for number in range(4000)]
    inside = [key for key in conversations if small.takes(key, "r1")]
    assert 0.07 < len(inside) / len(conversations) < 0.13
    assert all(great.takes(key, "r2") for key in inside)
    assert all(small.takes(key, str(number)) for number, key in enumerate(inside))


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 100)])
def test_nothing_and_everything_are_shares_too(share: float, expected: int) -> None:
    assert sum(Canary(policy="round_robin", share=share).takes("", str(number)) for number in range(100)) == expected


@pytest.mark.parametrize(
    "value",
    [
        b'{"share": 0.1}',
        b'{"share": 0.1, "guest": "g", "policy": "p"}',
        b'{"share": 1.1, "guest": "g"}',
        b'{"share": -1, "guest": "g"}',
        b'{"share": 0.5, "guest": "a.b"}',
        b'{"share": 0.5, "policy": "os:system"}',
        b'{"share": 0.5, "guest": "g", "also": 1}',
        b"\xff",
        b"[]",
    ],
)
def test_what_is_no_canary_is_refused(value: bytes) -> None:
    with pytest.raises(ConfigError):
        decoded(value)


def test_a_canary_comes_back_as_it_was() -> None:
    canary = Canary(guest="g", share=0.25)
    assert decoded(encoded(canary)) == canary


# What a decision says that it rests on


def test_a_decision_shows_the_engines_that_were_seen_the_chosen_one_among_them() -> None:
    def views(role: str, count: int) -> list[EngineView]:
        return [EngineView(engine_id=f"{role[0]}{number}", role=role) for number in range(count)]  # type: ignore[arg-type]

    question = RouteQuestion(
        request_id="r", model="m", prompt_bytes=1, prefills=views("prefill", 3), decodes=views("decode", 40)
    )
    choice = RouteChoice(mode="early", prefill_id="p2", decode_id="d39", reason="")
    basis = basis_of(question, choice, "x")
    shown = [view.engine_id for view in basis.engines]
    assert shown == ["p0", "p1", "p2", *(f"d{number}" for number in range(ENGINES_MAX - 1)), "d39"]
    assert basis.left_out == 40 - ENGINES_MAX
