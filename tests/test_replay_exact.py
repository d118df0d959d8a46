"""A decision names what its policy saw, so that asking again is exact: no ties, no guesses, whatever was reported."""

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.router_world import COMPLETION, World
from tests.test_replay_core import T

from kvbus.embedded import EmbeddedNats
from kvbus.replay import router as against_router
from kvbus.replay.recording import Recording, read
from kvbus.replay.views import questions_of
from kvbus.router.policies import Policy, load
from kvbus.trace.core import Line, line_of
from kvbus.trace.export import jsonl
from kvbus_schemas import AnyMessage, EngineView, Mode, RouteDecided, subjects

SEED = 5


@pytest.fixture
async def world(nats_server: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats_server.url) as made:
        yield made


def recording_of(messages: list[AnyMessage]) -> Recording:
    def lines() -> Iterator[Line]:
        for seq, message in enumerate(messages, 1):
            subject = subjects.subject_of(message, sender=message.source or "router", to="all")
            yield line_of(seq, float(seq), subject, message)

    return read(jsonl(lines()))


def policy_of(decided: RouteDecided) -> Policy | None:
    return None if decided.policy.startswith("guest ") else load(decided.policy)


@pytest.mark.nats
@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
async def test_what_a_real_router_decided_is_decided_again_without_a_tie(world: World, policy: str) -> None:
    rng = random.Random(SEED)
    engines = [await world.engine(role, f"{role}-{number}") for role in ("prefill", "decode") for number in range(3)]
    await world.start(policy=policy)
    modes: list[dict[str, Any]] = [{}, {}, {"x_kvbus_mode": "early"}, {"x_kvbus_mode": "deferred"}]
    modes += [{"x_kvbus_mode": "local"}]
    for _ in range(30):
        if rng.random() < 0.5:
            await rng.choice(engines).report(running=rng.randint(0, 4), waiting=rng.randint(0, 2))
        async with world.post(COMPLETION, **rng.choice(modes)) as response:
            assert response.status == 200
            await response.read()
    decided: list[AnyMessage] = [*world.said(RouteDecided)]
    assert len(decided) >= 30
    report = against_router.ask(recording_of(decided), policy_of)  # loads and cards are not even in it
    assert (report.differences, report.ties, len(report.answers)) == ([], 0, len(decided))


def decided(asked: Mode | None, *engines: EngineView, **given: Any) -> RouteDecided:
    facts: dict[str, Any] = {"mode": "early", "prefill_id": "p0", "decode_id": "d0", "policy": "least_loaded"}
    return RouteDecided(
        transfer_id=T, request_id="r", reason="", asked=asked, engines=list(engines), source="router", **(facts | given)
    )


P = EngineView(engine_id="p0", role="prefill", running=3)
D = EngineView(engine_id="d0", role="decode", waiting=2, load_age_ms=7.0, hit_tokens=99)


@pytest.mark.parametrize("asked", [None, "early", "deferred"])
def test_the_question_is_the_recorded_one(asked: Mode | None) -> None:
    (found,) = questions_of(recording_of([decided(asked, P, D)]))
    assert (found.question.asked, list(found.question.prefills), list(found.question.decodes)) == (asked, [P], [D])


def test_of_a_fleet_larger_than_a_decision_names_what_is_named_is_exact() -> None:
    (found,) = questions_of(recording_of([decided(None, P, D, engines_left_out=3)]))
    assert (list(found.question.prefills), list(found.question.decodes)) == ([P], [D])


def test_what_a_guest_decided_is_counted_and_not_asked_again() -> None:
    own = decided(None, P, D)
    recording = recording_of([own, replace(own, policy="guest theirs", transfer_id="b" * 32)])
    report = against_router.ask(recording, policy_of)
    assert (len(report.answers), report.by_guests, report.differences) == (1, 1, [])
