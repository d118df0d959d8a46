"""The life of a dispatch, as tables: facts in, verdicts out. Also the fleet and the choice of engines."""

import pytest

from kvbus.router.bodies import Asked, read
from kvbus.router.chooser import Chooser, PolicyFailed, Situation
from kvbus.router.core import Dispatch, Facts, Leg, Step, Verdict
from kvbus.router.fleet import REST_S, RETURN_GRACE_S, Engine, Fleet, compatible, rested
from kvbus.router.policies import LeastLoaded, RoundRobin, RouteChoice, RouteQuestion
from kvbus.router.problems import BadRequestError, BusyError
from kvbus_schemas import CancelOrdered, EngineCard, LoadReported, Mode, RequestServed, RouteDecided

PREFILL = Engine(engine_id="p", role="prefill", http_url="http://p", incarnation="p1")
DECODE = Engine(engine_id="d", role="decode", http_url="http://d", incarnation="d1")
BOTH = ("p", "d")


def dispatch(mode: Mode, *, attempt: int = 1, streaming: bool = False) -> Dispatch:
    """A dispatch whose legs are on their way, of at most two."""
    choice = RouteChoice(mode=mode, prefill_id="p", decode_id="d", reason="test")
    made = Dispatch(
        Facts(request_id="r", attempts_max=2),
        choice,
        transfer_id="0" * 32,
        attempt=attempt,
        deadline_s=9.0,
        prefill=None if mode == "local" else PREFILL,
        decode=DECODE,
    )
    for leg in ("prefill", "decode"):
        if leg == "decode" or mode == "early":
            made.sent(leg)
    if mode in {"deferred", "pull"}:
        made.open = {"prefill"}
    if streaming:
        made.answered("decode", 200)
    return made


def outline(verdict: Verdict) -> tuple[Step, tuple[str, ...], tuple[Leg, ...]]:
    """The step, who is told to cancel, which legs are closed."""
    assert all(isinstance(post.message, CancelOrdered) for post in verdict.posts)
    return verdict.step, tuple(post.to for post in verdict.posts), verdict.close


@pytest.mark.parametrize(
    ("mode", "leg", "status", "expected"),
    [
        ("early", "prefill", 200, ("go_on", (), ())),
        ("early", "prefill", 400, ("go_on", BOTH, ())),
        ("early", "prefill", 500, ("go_on", BOTH, ())),
        ("early", "decode", 200, ("pass_on", (), ())),
        ("early", "decode", 400, ("pass_on", BOTH, ("prefill",))),
        ("early", "decode", 429, ("pass_on", BOTH, ("prefill",))),
        ("early", "decode", 500, ("retry", BOTH, ("prefill",))),
        ("deferred", "prefill", 200, ("go_on", (), ())),
        ("deferred", "prefill", 400, ("pass_on", BOTH, ())),
        ("deferred", "prefill", 503, ("retry", BOTH, ())),
        ("pull", "prefill", 400, ("pass_on", (), ())),
        ("pull", "prefill", 503, ("retry", (), ())),
        ("local", "decode", 200, ("pass_on", (), ())),
        ("local", "decode", 404, ("pass_on", (), ())),
        ("local", "decode", 502, ("retry", (), ())),
    ],
)
def test_what_an_answer_means(mode: Mode, leg: Leg, status: int, expected: tuple[object, ...]) -> None:
    assert outline(dispatch(mode).answered(leg, status)) == expected


@pytest.mark.parametrize(
    ("mode", "leg", "attempt", "streaming", "expected"),
    [
        ("early", "prefill", 1, False, ("go_on", BOTH, ())),
        ("early", "prefill", 2, True, ("go_on", BOTH, ())),
        ("early", "decode", 1, False, ("retry", BOTH, ("prefill",))),
        ("early", "decode", 2, False, ("give_up", BOTH, ("prefill",))),
        ("early", "decode", 1, True, ("break_off", BOTH, ("prefill",))),
        ("deferred", "prefill", 1, False, ("retry", BOTH, ())),
        ("deferred", "prefill", 2, False, ("give_up", BOTH, ())),
        ("local", "decode", 1, False, ("retry", (), ())),
        ("local", "decode", 2, False, ("give_up", (), ())),
        ("local", "decode", 1, True, ("break_off", (), ())),
    ],
)
def test_what_a_broken_leg_means(
    mode: Mode, leg: Leg, attempt: int, streaming: bool, expected: tuple[object, ...]
) -> None:
    verdict = dispatch(mode, attempt=attempt, streaming=streaming).failed(leg, "gone")
    assert outline(verdict) == expected
    assert (verdict.problem is not None) == (verdict.step != "go_on")


@pytest.mark.parametrize(("mode", "leg"), [("early", "prefill"), ("early", "decode"), ("deferred", "prefill")])
def test_a_refused_ticket_is_a_failed_leg_and_no_answer_for_the_client(mode: Mode, leg: Leg) -> None:
    refused = dispatch(mode).answered(leg, 400, ticket_refused=True)
    assert outline(refused) == outline(dispatch(mode).failed(leg, "gone"))


@pytest.mark.parametrize(
    ("streaming", "left", "late"),
    [
        (False, ("stop", BOTH, ("prefill", "decode")), ("give_up", BOTH, ("prefill", "decode"))),
        (True, ("stop", BOTH, ("prefill", "decode")), ("break_off", BOTH, ("prefill", "decode"))),
    ],
)
def test_a_client_that_leaves_and_a_deadline_cancel_both_legs(
    streaming: bool, left: tuple[object, ...], late: tuple[object, ...]
) -> None:
    assert outline(dispatch("early", streaming=streaming).client_left()) == left
    verdict = dispatch("early", streaming=streaming).deadline_passed()
    assert outline(verdict) == late
    assert verdict.problem is not None
    assert verdict.problem.status == 504


def test_a_deferred_transfer_without_a_decode_is_cancelled_at_its_producer() -> None:
    made = dispatch("deferred")
    made.decode = None
    assert outline(made.undecided()) == ("stop", ("p",), ("prefill",))


def test_the_last_attempt_passes_the_engines_own_error_on() -> None:
    assert outline(dispatch("early", attempt=2).answered("decode", 500)) == ("pass_on", BOTH, ("prefill",))


def test_a_transfer_is_cancelled_once() -> None:
    made = dispatch("early")
    assert len(made.failed("prefill", "x").posts) == 2
    assert made.failed("decode", "x").posts == ()
    assert made.client_left().posts == ()


def test_prefill_failing_after_the_answer_is_complete_concerns_nobody() -> None:
    made = dispatch("early", streaming=True)
    made.ended()
    assert outline(made.failed("prefill", "late")) == ("go_on", (), ())


def test_the_last_word_is_said_once() -> None:
    made = dispatch("early")
    (post,) = made.served("completed", 200, ttft_ms=1.0)
    assert isinstance(post.message, RequestServed)
    assert made.served("failed", 500) == ()


def test_tickets_of_both_legs_name_both_engines_and_incarnations() -> None:
    made = dispatch("early")
    for leg, engine in (("prefill", PREFILL), ("decode", DECODE)):
        made.ticket(leg).check(engine.engine_id, engine.incarnation)  # type: ignore[arg-type]
    decided = made.decided(7).message
    assert isinstance(decided, RouteDecided)
    assert (decided.prefill_id, decided.decode_id, decided.decided_us) == ("p", "d", 7)


def test_a_deferred_prefill_ticket_names_no_decode() -> None:
    choice = RouteChoice(mode="deferred", prefill_id="p", decode_id="", reason="")
    made = Dispatch(
        Facts(request_id="r"), choice, transfer_id="0" * 32, attempt=1, deadline_s=1.0, prefill=PREFILL, decode=None
    )
    assert made.ticket("prefill").consumer_id == ""
    made.decode_chosen(choice, DECODE, 0.5)
    made.ticket("decode").check("d", "d1")


# The fleet


def card(engine_id: str, role: str = "decode", *, incarnation: str = "1", **given: object) -> EngineCard:
    fields = {"http_url": f"http://{engine_id}", "model": "m", "block_size": 16, "num_blocks": 1} | given
    return EngineCard(engine_id=engine_id, role=role, incarnation=incarnation, **fields)  # type: ignore[arg-type]


def load(engine_id: str, *, running: int = 0, waiting: int = 0, incarnation: str = "1") -> LoadReported:
    return LoadReported(
        engine_id=engine_id, running=running, waiting=waiting, free_blocks=1, total_blocks=1, incarnation=incarnation
    )


def ids(engines: list[Engine]) -> list[str]:
    return [engine.engine_id for engine in engines]


def test_an_engine_lives_from_its_card_to_its_withdrawal() -> None:
    fleet = Fleet()
    assert fleet.card_seen(card("a")) is None
    assert fleet.card_seen(card("a")) is None
    assert ids(fleet.alive("decode")) == ["a"]
    assert fleet.alive("prefill") == []
    fleet.card_gone("a", 0.0)
    fleet.card_gone("a", 0.0)
    assert fleet.alive("decode") == []


def test_another_incarnation_replaces_the_engine_and_forgets_its_load() -> None:
    fleet = Fleet()
    fleet.card_seen(card("a"))
    fleet.load_seen(load("a", running=5), 0.0)
    dead = fleet.card_seen(card("a", incarnation="2"))
    assert dead is not None
    assert dead.incarnation == "1"
    fleet.load_seen(load("a", running=7, incarnation="1"), 1.0)
    assert fleet.engines["a"].view(1.0).running == 0


def test_a_draining_engine_gets_no_more() -> None:
    fleet = Fleet()
    fleet.card_seen(card("a"))
    assert ids(fleet.alive("decode")) == ["a"]
    fleet.card_seen(card("a", draining=True))
    assert fleet.alive("decode") == []


def test_after_nats_returned_a_missing_card_counts_only_after_the_grace() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.card_seen(card(name))
    fleet.bus_returned(10.0)
    fleet.card_gone("a", 10.1)
    fleet.card_gone("b", 10.1)
    fleet.card_seen(card("a"))
    fleet.tick(10.0 + RETURN_GRACE_S - 0.1)
    assert ids(fleet.alive("decode")) == ["a", "b"]
    fleet.tick(10.0 + RETURN_GRACE_S)
    assert ids(fleet.alive("decode")) == ["a"]


def test_what_was_sent_since_the_last_report_counts_as_waiting() -> None:
    fleet = Fleet()
    fleet.card_seen(card("a"))
    fleet.load_seen(load("a", running=1, waiting=2), 5.0)
    fleet.sent("a")
    view = fleet.engines["a"].view(5.5)
    assert (view.running, view.waiting, view.load_age_ms) == (1, 3, 500.0)
    fleet.load_seen(load("a", running=2), 6.0)
    assert fleet.engines["a"].view(6.0).waiting == 0


def test_without_a_report_what_is_in_flight_stands_in() -> None:
    fleet = Fleet()
    fleet.card_seen(card("a"))
    fleet.sent("a")
    fleet.sent("a")
    fleet.finished("a")
    assert fleet.engines["a"].view(0.0).running == 1


def test_an_engine_that_failed_rests_unless_it_is_the_only_one() -> None:
    one, two = (Engine(engine_id=name, role="decode", http_url="") for name in "ab")
    one.rests_until_s = REST_S
    assert ids(rested([one, two], 0.0, ())) == ["b"]
    assert ids(rested([one, two], REST_S, ())) == ["a", "b"]
    assert ids(rested([one], 0.0, ())) == ["a"]
    assert ids(rested([one, two], 9.0, {"b"})) == ["a"]
    assert ids(rested([two], 9.0, {"b"})) == ["b"]


def test_only_engines_of_one_layout_are_paired_the_less_crowded_ones() -> None:
    def engine(name: str, compat: str, busy: int = 0) -> Engine:
        role = "prefill" if name.startswith("p") else "decode"
        return Engine(engine_id=name, role=role, http_url="", compat_hash=compat, in_flight=busy)  # type: ignore[arg-type]

    prefills = [engine("p1", "x"), engine("p2", "y")]
    decodes = [engine("d1", "x", busy=3), engine("d2", "y"), engine("d3", "z")]
    chosen = compatible(prefills, decodes)
    assert (ids(chosen[0]), ids(chosen[1])) == (["p2"], ["d2"])
    assert compatible([engine("p", "q")], decodes) == ([], decodes)


# The choice


def situation(**given: object) -> Situation:
    fields: dict[str, object] = {"now_s": 0.0, "bus_connected": True, "asked": None, "attempt": 1}
    return Situation(**(fields | given))  # type: ignore[arg-type]


def fleet_of(*cards: EngineCard, static: bool = False) -> Fleet:
    fleet = Fleet()
    for one in cards:
        fleet.card_seen(one)
    if static:
        fleet.add_static(Engine(engine_id="sp", role="prefill", http_url="", static=True))
        fleet.add_static(Engine(engine_id="sd", role="decode", http_url="", static=True))
    return fleet


ASKED: Asked = read("completions", b'{"prompt": "x"}')
UNSPLITTABLE: Asked = read("completions", b'{"prompt": "x", "prompt_logprobs": 1}')
PAIR = (card("p", "prefill"), card("d"))


@pytest.mark.parametrize(
    ("fleet", "asked", "given", "expected"),
    [
        (fleet_of(*PAIR), ASKED, {}, ("early", "p", "d")),
        (fleet_of(*PAIR), ASKED, {"asked": "deferred"}, ("deferred", "p", "")),
        (fleet_of(*PAIR), ASKED, {"asked": "local"}, ("local", "", "d")),
        (fleet_of(*PAIR), UNSPLITTABLE, {"asked": "early"}, ("local", "", "d")),
        (fleet_of(*PAIR), ASKED, {"bus_connected": False}, ("local", "", "d")),
        (fleet_of(card("d")), ASKED, {"asked": "early"}, ("local", "", "d")),
        (fleet_of(static=True), ASKED, {}, ("pull", "sp", "sd")),
        (fleet_of(static=True), ASKED, {"bus_connected": False}, ("pull", "sp", "sd")),
        (fleet_of(static=True), UNSPLITTABLE, {}, ("local", "", "sd")),
        (fleet_of(*PAIR, static=True), ASKED, {}, ("early", "p", "d")),
        (fleet_of(*PAIR, static=True), ASKED, {"asked": "pull"}, ("pull", "sp", "sd")),
    ],
)
def test_mode_and_engines_follow_from_the_situation(
    fleet: Fleet, asked: Asked, given: dict[str, object], expected: tuple[str, str, str]
) -> None:
    choice = Chooser(fleet, RoundRobin()).choose(asked, "r", situation(**given)).choice
    assert (choice.mode, choice.prefill_id, choice.decode_id) == expected


@pytest.mark.parametrize(
    ("fleet", "given", "code"),
    [
        (fleet_of(), {}, "no_decode_engine"),
        (fleet_of(card("p", "prefill")), {}, "no_decode_engine"),
        (fleet_of(), {"bus_connected": False}, "bus_lost"),
        (fleet_of(*PAIR), {"bus_connected": False, "asked": "early"}, "bus_lost"),
        (fleet_of(*PAIR), {"asked": "pull"}, "mode_unavailable"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_code(fleet: Fleet, given: dict[str, object], code: str) -> None:
    with pytest.raises((BusyError, BadRequestError)) as caught:
        Chooser(fleet, LeastLoaded()).choose(ASKED, "r", situation(**given))
    assert caught.value.code == code


class Fixed:
    """A policy that always gives the same answer."""

    name = "fixed"

    def __init__(self, **given: str) -> None:
        self.choice = RouteChoice(**({"prefill_id": "p", "decode_id": "d", "reason": "", "mode": "early"} | given))  # type: ignore[arg-type]

    def choose(self, _question: RouteQuestion) -> RouteChoice:
        return self.choice


@pytest.mark.parametrize(
    "given",
    [
        {"decode_id": "x"},
        {"prefill_id": "d"},
        {"prefill_id": ""},
        {"decode_id": ""},
        {"mode": "local"},
        {"mode": "pull"},
    ],
)
def test_a_choice_outside_the_question_is_the_policys_fault(given: dict[str, str]) -> None:
    with pytest.raises(PolicyFailed):
        Chooser(fleet_of(*PAIR), Fixed(**given)).choose(ASKED, "r", situation())
