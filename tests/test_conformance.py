"""kvbus conformance: each rule of the contract is checked by asking a router that breaks just that one."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.test_router_guests import choice_of

from kvbus.bus import Bus, BusSettings
from kvbus.conformance import examine
from kvbus.conformance.examine import Examiner, figures
from kvbus.conformance.judge import Row
from kvbus.embedded import EmbeddedNats
from kvbus_schemas import RouteAnswered, RouteAsked, UndecodableError, decode, encode, subjects

pytestmark = pytest.mark.nats
DEADLINE_MS = 300.0
Answers = list[tuple[str, bytes]]
"""Each answer's sender and bytes."""


class Pupil:
    """A router under examination, as bytes on a connection, so that it can break every rule. `answers` makes what it
    says to a question."""

    def __init__(self, bus: Bus) -> None:
        self.name = bus.name
        self.seq = itertools.count(1)
        self.answers: Callable[[Pupil, RouteAsked], Answers] = lambda pupil, asked: [pupil.right(asked)]
        self.delay_s = 0.0
        self.hears_all = False
        self.reads_anything = False
        self._bus = bus

    async def listen(self) -> None:
        heard = subjects.of_kind(RouteAsked) if self.hears_all else subjects.of_kind(RouteAsked, to=self.name)
        for subject in (heard, *(() if self.hears_all else (subjects.of_kind(RouteAsked, to="all"),))):
            await self._bus._link.subscribe(subject, self._on_asked, queue="", pending_max=1000)

    async def _on_asked(self, msg: Any) -> None:
        data = msg.data.replace(b"\xb5RouteAskedDifferently", b"\xaaRouteAsked") if self.reads_anything else msg.data
        try:
            asked = decode(data)
        except UndecodableError:
            return
        assert isinstance(asked, RouteAsked)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        for sender, answer in self.answers(self, asked):
            subject = f"kvbus.v1.route.route_answered.{sender}.{asked.source}.{asked.ask_id}"
            await self._bus._link.publish(subject, answer)

    def right(self, asked: RouteAsked, **given: Any) -> tuple[str, bytes]:
        envelope = {"source": self.name, "incarnation": "i1", "seq": next(self.seq), "sent_unix_us": 1}
        return self.name, encode(replace(choice_of(asked), **(envelope | given)))


@pytest.fixture
async def pupil(nats_server: EmbeddedNats) -> AsyncIterator[Pupil]:
    bus = await Bus.connect(BusSettings(nats=nats_server.url), name="pupil", incarnation="i")
    yield Pupil(bus)
    await bus.close()


async def examined(nats_server: EmbeddedNats, pupil: Pupil, deadline_ms: float = DEADLINE_MS) -> dict[str, Row]:
    await pupil.listen()
    bus = await Bus.connect(BusSettings(nats=nats_server.url), name="examiner", incarnation="i")
    try:
        examiner = Examiner(bus, pupil.name, deadline_ms)
        rows = await examiner.run()
        assert bool(figures(examiner.took_ms)) == bool(examiner.took_ms)
    finally:
        await bus.close()
    assert all(row.found and row.advice for row in rows if not row.passed)
    return {row.check: row for row in rows}


def failed(rows: dict[str, Row]) -> set[str]:
    return {row.check for row in rows.values() if not row.passed}


async def test_a_router_that_keeps_the_contract_passes_everything(nats_server: EmbeddedNats, pupil: Pupil) -> None:
    rows = await examined(nats_server, pupil, 5000.0)
    assert failed(rows) == set()
    assert len(rows) > 20


def stranger(pupil: Pupil, asked: RouteAsked) -> Answers:
    return [pupil.right(asked, decode_id="decode-77")]


def always_early(pupil: Pupil, asked: RouteAsked) -> Answers:
    prefills = [view.engine_id for view in asked.engines if view.role == "prefill"]
    return [pupil.right(asked, mode="early", prefill_id=prefills[0] if prefills else "", decode_id="decode-0")]


def without(field: str, value: Any) -> Callable[[Pupil, RouteAsked], Answers]:
    return lambda pupil, asked: [pupil.right(asked, **{field: value})]


def twice(pupil: Pupil, asked: RouteAsked) -> Answers:
    return [pupil.right(asked), pupil.right(asked)]


def other_ask(pupil: Pupil, asked: RouteAsked) -> Answers:
    return [pupil.right(asked), (pupil.name, encode(RouteAnswered(ask_id="f" * 32, prefill_id="", decode_id="")))]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (always_early, {"no_prefill", "mode_local", "mode_deferred", "mode_pull", "deferred_decode"}),
        (twice, {"once"}),
        (other_ask, {"readable"}),
        (without("incarnation", ""), {"incarnation"}),
        (without("sent_unix_us", 0), {"sent_unix_us"}),
        (without("seq", 7), {"seq"}),
        (without("source", ""), {"source", "shadow"}),
    ],
)
async def test_each_broken_rule_is_named_and_no_other(
    nats_server: EmbeddedNats,
    pupil: Pupil,
    answers: Callable[[Pupil, RouteAsked], Answers],
    expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examine, "LATE_FACTOR", 0.2)  # what comes later still counts as in time
    pupil.answers = answers
    assert failed(await examined(nats_server, pupil, 5000.0)) == expected


async def test_an_engine_that_was_not_offered_fails_every_question(nats_server: EmbeddedNats, pupil: Pupil) -> None:
    pupil.answers = stranger
    rows = await examined(nats_server, pupil, 5000.0)
    assert {"pair", "some", "burst"} <= failed(rows)
    assert "'decode-77' was not among the candidates" in rows["pair"].found


async def test_garbage_is_named_with_its_subject(nats_server: EmbeddedNats, pupil: Pupil) -> None:
    pupil.answers = lambda pupil, _asked: [(pupil.name, b"\xc1")]
    rows = await examined(nats_server, pupil, 500.0)
    assert "kvbus.v1.route.route_answered.pupil.examiner." in rows["readable"].found
    assert rows["pair"].found == "no answer"


async def test_a_router_that_reads_what_is_not_its_own_is_told_so(nats_server: EmbeddedNats, pupil: Pupil) -> None:
    pupil.hears_all = pupil.reads_anything = True
    assert failed(await examined(nats_server, pupil, 5000.0)) == {"for_another", "unknown_type"}


async def test_a_deadline_that_is_missed_is_named_with_the_time_it_took(
    nats_server: EmbeddedNats, pupil: Pupil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "LATE_FACTOR", 100.0)
    pupil.delay_s = 0.02
    rows = await examined(nats_server, pupil, 5.0)
    assert "the deadline was 5 ms" in rows["pair"].found


async def test_nobody_there_is_one_clear_row(
    nats_server: EmbeddedNats, pupil: Pupil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "FIRST_ANSWER_S", 0.3)
    pupil.answers = lambda _pupil, _asked: []
    rows = await examined(nats_server, pupil)
    assert failed(rows) == {"there"}
    assert "kvbus.v1.route.route_asked.*.pupil.*" in rows["there"].advice
