"""Policies: who is chosen, with which scores, and how a policy is found."""

from collections import Counter
from importlib.metadata import entry_points
from typing import Any

import pytest
from msgspec.structs import replace

from kvbus.errors import ConfigError
from kvbus.router.fleet import Engine, Fleet
from kvbus.router.policies import GROUP, NAMED_MAX, LeastLoaded, Policy, RoundRobin, RouteQuestion, load
from kvbus.router.policies_spread import PowerOfTwo, Random, SessionAffinity
from kvbus.router.policies_weighed import PrefixAware, Weighed
from kvbus.router.settings import RouterSettings
from kvbus_schemas import EngineView, LoadReported, Mode


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


def test_every_policy_is_an_entry_point_and_answers() -> None:
    names = {point.name for point in entry_points(group=GROUP)}
    built_in = {"round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "prefix_aware", "weighed"}
    assert names >= built_in
    assert RouterSettings().policy == "weighed"
    for name in built_in:
        policy = load(name)
        assert policy.name == name
        choice = policy.choose(question(views("prefill", (0, 0)), views("decode", (0, 0))))
        assert (choice.prefill_id, choice.decode_id, choice.mode) == ("p0", "d0", "early")
        assert policy.choose(question([], views("decode", (0, 0)))).mode == "local"


def test_of_many_engines_the_best_are_named() -> None:
    asked = question([], views("decode", *[(number, 0) for number in range(40, 0, -1)]))
    for policy in (RoundRobin(), LeastLoaded(), Weighed(), PrefixAware(), SessionAffinity(), Random()):
        choice = policy.choose(asked)
        assert len(choice.candidates) == NAMED_MAX
        assert max(choice.candidates, key=lambda candidate: candidate.score).engine_id == choice.decode_id


def request(number: int, engines: list[EngineView], **fields: Any) -> RouteQuestion:
    return replace(question([], engines), request_id=f"r{number}", **fields)


def test_random_is_even_and_the_same_for_the_same_request() -> None:
    engines = views("decode", *[(0, 0)] * 5)
    counts = Counter(Random().choose(request(number, engines)).decode_id for number in range(2000))
    assert len(counts) == 5
    assert max(counts.values()) < 2 * min(counts.values())
    once = [Random().choose(request(number, engines)).decode_id for number in range(50)]
    assert once == [Random().choose(request(number, engines)).decode_id for number in range(50)]


def test_of_two_by_chance_the_less_loaded_is_taken() -> None:
    engines = views("decode", *[(load, 0) for load in range(10)])
    counts = Counter(PowerOfTwo().choose(request(number, engines)).decode_id for number in range(1000))
    assert counts["d0"] > counts["d5"] > 0
    assert counts["d9"] == 0  # the most loaded never wins
    assert PowerOfTwo().choose(request(1, engines[:1])).decode_id == "d0"


def test_a_conversation_stays_and_only_those_of_a_lost_engine_move() -> None:
    engines = views("decode", *[(0, 0)] * 10)
    policy = SessionAffinity()

    def places(there: list[EngineView]) -> list[str]:
        return [policy.choose(request(n, there, conversation=f"c{n}")).decode_id for n in range(500)]

    before, after = places(engines), places(engines[:9])
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d9"}
    assert before == places(list(reversed(engines)))
    assert max(Counter(before).values()) < 3 * min(Counter(before).values())


def test_without_a_conversation_prompts_that_begin_alike_stay_together() -> None:
    engines = views("decode", *[(0, 0)] * 10)
    policy = SessionAffinity()
    together = {policy.choose(request(number, engines, head="same")).decode_id for number in range(20)}
    apart = {policy.choose(request(number, engines, head=f"h{number}")).decode_id for number in range(20)}
    assert len(together) == 1
    assert len(apart) > 3


def holding(engine: EngineView, hit: int, **fields: Any) -> EngineView:
    return replace(engine, hit_tokens=hit, cache="exact", **fields)


def test_prefix_aware_takes_the_longest_prefix_whatever_the_load() -> None:
    p0, p1, p2 = views("prefill", (50, 50), (0, 0), (1, 0))
    asked = question([holding(p0, 64), p1, p2], views("decode", (0, 0)))
    assert PrefixAware().choose(asked).prefill_id == "p0"
    assert {PrefixAware().choose(question([p2, p1], views("decode", (0, 0)))).prefill_id for _ in range(3)} == {"p1"}


def test_weighed_follows_a_prefix_until_the_queue_there_is_far_longer() -> None:
    p0, p1 = views("prefill", (0, 0), (0, 0))
    decodes = views("decode", (0, 0))

    def chosen_with(queued: int, hit: int, **fields: Any) -> str:
        busy = replace(p0, running=1, queued_tokens=queued)
        asked = question([replace(busy, hit_tokens=hit, **{"cache": "exact", **fields}), p1], decodes)
        asked = replace(asked, prompt_tokens=hit + 500, asked="early")
        return Weighed().choose(asked).prefill_id

    assert chosen_with(queued=20_000, hit=8000) == "p0"
    assert chosen_with(queued=20_000, hit=100) == "p1"
    assert chosen_with(queued=8000 * 160, hit=8000) == "p1"
    assert chosen_with(queued=90_000, hit=1000) == "p0"
    assert chosen_with(queued=90_000, hit=1000, cache="degraded") == "p1"


def test_weighed_sends_a_long_prompt_that_nobody_knows_where_few_come() -> None:
    """All who come next would wait for it."""
    p0, p1 = views("prefill", (6, 0), (1, 0))
    asked = question([replace(p0, queued_tokens=600), replace(p1, queued_tokens=50_000)], views("decode", (0, 0)))
    for tokens, prefill_id in ((100, "p0"), (60_000, "p1")):
        assert Weighed().choose(replace(asked, prompt_tokens=tokens, asked="early")).prefill_id == prefill_id


def test_weighed_says_what_it_weighed() -> None:
    p0, p1 = views("prefill", (1, 0), (0, 0))
    asked = replace(question([holding(p0, 4000, queued_tokens=300), p1], views("decode", (2, 1))), prompt_tokens=5000)
    choice = Weighed().choose(asked)
    for candidate in choice.candidates:
        assert candidate.score == pytest.approx(sum(candidate.terms.values()))
    assert "4000 of about 5000 tokens are there, exact" in choice.reason
    part = replace(asked, prefills=[replace(p0, hit_tokens=64, cache="degraded"), p1])
    assert "1 caches known in part" in Weighed().choose(part).reason


BUSY = {"total_blocks": 100, "free_blocks": 5}


@pytest.mark.parametrize(
    ("tokens", "decode", "queued", "fields", "mode"),
    [
        (40, {}, 0, {}, "local"),
        (4000, {}, 0, {}, "early"),
        (0, {}, 0, {}, "early"),  # nothing is known of its length
        (40, BUSY, 0, {}, "early"),  # no room for more at decode
        (40, {"waiting": 9}, 0, {}, "early"),
        (4000, BUSY, 50_000, {}, "deferred"),
        (4000, BUSY, 100, {}, "early"),  # prefill begins at once: nothing is held in vain
        (4000, {}, 30_000, {}, "early"),
        (4000, {}, 50_000, {}, "local"),  # prefill would take a second to begin
        (7000, {}, 50_000, {}, "early"),  # the batch would stand still for long
        (7000, {}, 90_000, {}, "local"),
        (4000, {"queued_tokens": 30_000}, 50_000, {}, "early"),  # decode has enough of its own already
        (64_000, {"hit_tokens": 60_000, "cache": "exact"}, 50_000, {}, "local"),  # it computes what it lacks
        (64_000, {"hit_tokens": 60_000, "cache": "degraded"}, 50_000, {}, "early"),  # half of it at the most
        (64_000, {"hit_tokens": 60_000}, 50_000, {}, "early"),  # held for prefill to take back, not in a cache
        (4000, {}, 50_000, {"asked": "early"}, "early"),
        (4000, {}, 50_000, {"asked": "pull", "free": True}, "pull"),
        (40, {}, 0, {"asked": "early"}, "early"),
        (4000, BUSY, 50_000, {"asked": "early"}, "early"),
        (40, {}, 0, {"asked": "pull", "free": True}, "local"),
        (4000, {}, 0, {"asked": "pull", "free": True}, "pull"),
        (40, {}, 0, {"asked": "pull"}, "pull"),
    ],
)
def test_the_mode_follows_length_and_pressure_and_the_client_before_both(
    tokens: int, decode: dict[str, Any], queued: int, fields: dict[str, Any], mode: str
) -> None:
    (prefill,), (free,) = views("prefill", (0, 0)), views("decode", (0, 0))
    made = question([replace(prefill, queued_tokens=queued)], [replace(free, **decode)])
    choice = Weighed().choose(replace(made, prompt_tokens=tokens, **fields))
    assert choice.mode == mode
    assert (choice.prefill_id == "") == (mode == "local")
    assert (choice.decode_id == "") == (mode == "deferred")


def test_weighed_answers_the_second_question_of_deferred() -> None:
    asked = replace(question([], views("decode", (5, 0), (1, 0))), part="decode", asked="deferred")
    choice = Weighed().choose(asked)
    assert (choice.mode, choice.prefill_id, choice.decode_id) == ("deferred", "", "d1")


def test_two_routers_count_each_others_requests_as_work() -> None:
    """What an engine reports beyond this router's own requests stands for work of others, and stays bounded below."""
    engine = Engine(engine_id="p0", role="prefill", http_url="")
    fleet = Fleet()
    fleet.engines["p0"] = engine
    fleet.sent("p0", 5000)
    fleet.load_seen(LoadReported(engine_id="p0", running=1, waiting=2, free_blocks=1, total_blocks=2), 0.0)
    assert engine.view(0.0).queued_tokens == 5000 + int(2 * engine.mean_work)
    fleet.finished("p0", 5000)
    assert engine.view(0.0).queued_tokens == int(2 * engine.mean_work)
