"""Policies: who is chosen, with which scores, and how a policy is found."""

import pytest

from kvbus.errors import ConfigError
from kvbus.router.policies import LeastLoaded, Policy, RoundRobin, RouteQuestion, load
from kvbus_schemas import EngineView, Mode


def views(role: str, *loads: tuple[int, int]) -> list[EngineView]:
    return [
        EngineView(engine_id=f"{role[0]}{number}", role=role, running=running, waiting=waiting)  # type: ignore[arg-type]
        for number, (running, waiting) in enumerate(loads)
    ]


def question(prefills: list[EngineView], decodes: list[EngineView], asked: Mode | None = None) -> RouteQuestion:
    return RouteQuestion(request_id="r", model="m", prompt_bytes=1, prefills=prefills, decodes=decodes, asked=asked)


def chosen(policy: Policy, asked: RouteQuestion) -> tuple[str, str]:
    choice = policy.choose(asked)
    return choice.prefill_id, choice.decode_id


def test_round_robin_takes_each_in_turn_whatever_the_load() -> None:
    policy = RoundRobin()
    asked = question(views("prefill", (9, 9), (0, 0)), views("decode", (5, 0), (0, 0), (1, 0)))
    assert [chosen(policy, asked) for _ in range(4)] == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0")]


def test_least_loaded_takes_the_one_with_the_fewest_requests() -> None:
    asked = question(views("prefill", (2, 0), (0, 1)), views("decode", (1, 5), (4, 0), (0, 9)))
    assert {chosen(LeastLoaded(), asked) for _ in range(3)} == {("p1", "d1")}


def test_least_loaded_spreads_over_equals() -> None:
    policy = LeastLoaded()
    asked = question([], views("decode", (0, 0), (0, 0), (0, 0)))
    assert len({chosen(policy, asked) for _ in range(6)}) == 3


def test_least_loaded_prefers_free_blocks_among_equals() -> None:
    full = EngineView(engine_id="full", role="decode", free_blocks=1, total_blocks=10)
    empty = EngineView(engine_id="empty", role="decode", free_blocks=9, total_blocks=10)
    assert {chosen(LeastLoaded(), question([], [full, empty]))[1] for _ in range(2)} == {"empty"}


@pytest.mark.parametrize("policy", [RoundRobin(), LeastLoaded()])
def test_the_best_score_is_the_choice_and_every_candidate_is_named(policy: Policy) -> None:
    choice = policy.choose(question(views("prefill", (1, 0), (0, 0)), views("decode", (1, 0), (0, 0))))
    for role, picked in (("prefill", choice.prefill_id), ("decode", choice.decode_id)):
        scores = {c.engine_id: c.score for c in choice.candidates if c.role == role}
        assert len(scores) == 2
        assert max(scores, key=lambda name: scores[name]) == picked


@pytest.mark.parametrize(
    ("asked", "prefills", "mode"),
    [
        (None, 1, "early"),
        (None, 0, "local"),
        ("early", 0, "local"),
        ("deferred", 1, "deferred"),
        ("pull", 1, "pull"),
        ("local", 1, "local"),
    ],
)
def test_the_mode_is_the_one_asked_for_if_it_can_be_had(asked: Mode | None, prefills: int, mode: str) -> None:
    made = question(views("prefill", *[(0, 0)] * prefills), views("decode", (0, 0)), asked)
    assert RoundRobin().choose(made).mode == mode


def test_a_policy_is_found_by_entry_point_or_by_module_and_class() -> None:
    assert isinstance(load("round_robin"), RoundRobin)
    assert isinstance(load("kvbus.router.policies:LeastLoaded"), LeastLoaded)


@pytest.mark.parametrize("name", ["nonsense", "no.such.module:X", "kvbus.router.policies:Nobody"])
def test_an_unknown_policy_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError):
        load(name)
