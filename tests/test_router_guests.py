"""Routers on the bus that decide for ours, are compared with it, or get a share: real NATS, real HTTP, rude guests."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.router_world import COMPLETION, World, until

from kvbus.bus import Bus, BusSettings
from kvbus.embedded import EmbeddedNats
from kvbus.process import new_incarnation
from kvbus.router.breaker import BREAKER_FAILURES
from kvbus.router.canary import CANARY_KEY, Canary, encoded
from kvbus.router.service import Router
from kvbus_schemas import AnyMessage, RouteAnswered, RouteAsked, RouteDecided, encode, subjects

pytestmark = pytest.mark.nats
PATIENT_MS = 5000.0


@pytest.fixture
async def world(nats_server: EmbeddedNats) -> AsyncIterator[World]:
    async with World(nats_server.url) as made:
        yield made


class Guest:
    """A router on the bus that does as `act` says with each question."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.name = bus.name
        self.asked: list[RouteAsked] = []
        self.act: Callable[[Guest, RouteAsked], Awaitable[None]] = answering()

    async def on_asked(self, message: AnyMessage) -> None:
        assert isinstance(message, RouteAsked)
        self.asked.append(message)
        await self.act(self, message)

    async def raw(self, asked: RouteAsked, data: bytes) -> None:
        answer = RouteAnswered(ask_id=asked.ask_id, prefill_id="", decode_id="")
        await self.bus._link.publish(subjects.subject_of(answer, sender=self.name, to=asked.source), data)


def choice_of(asked: RouteAsked, **given: Any) -> RouteAnswered:
    """The last engine of each role, in the mode that is asked for."""
    ids = {role: [view.engine_id for view in asked.engines if view.role == role] for role in ("prefill", "decode")}
    mode = (asked.asked or "early") if ids["prefill"] or asked.part == "decode" else "local"
    prefill_id = ids["prefill"][-1] if ids["prefill"] and mode != "local" else ""
    decode_id = "" if mode == "deferred" and asked.part == "both" else ids["decode"][-1]
    fields = {"ask_id": asked.ask_id, "mode": mode, "prefill_id": prefill_id, "decode_id": decode_id, "reason": "last"}
    return RouteAnswered(**(fields | given))


def answering(after: asyncio.Event | None = None, times: int = 1, **given: Any) -> Any:
    async def act(guest: Guest, asked: RouteAsked) -> None:
        if after is not None:
            await after.wait()
        for _ in range(times):
            await guest.bus.publish(choice_of(asked, **given), asked.source)

    return act


def saying(data: bytes) -> Any:
    async def act(guest: Guest, asked: RouteAsked) -> None:
        await guest.raw(asked, data)

    return act


async def silent(_guest: Guest, _asked: RouteAsked) -> None:
    """Says nothing."""


@pytest.fixture
async def guest_of(world: World) -> AsyncIterator[Callable[..., Awaitable[Guest]]]:
    made: list[Bus] = []

    async def make(name: str = "") -> Guest:
        bus = await Bus.connect(
            BusSettings(nats=world.nats), name=name or f"g-{secrets.token_hex(4)}", incarnation=new_incarnation()
        )
        made.append(bus)
        guest = Guest(bus)
        for to in (guest.name, "all"):
            await bus.subscribe(subjects.of_kind(RouteAsked, to=to), guest.on_asked)
        return guest

    yield make
    for bus in made:
        await bus.close()


async def fleet(world: World, **settings: Any) -> Router:
    """Two prefills, two decodes, and a router whose policy takes the first of each first."""
    for role in ("prefill", "decode"):
        for number in range(2):
            await world.engine(role, f"{role}-{number}")
    return await world.start(**({"guest_deadline_ms": PATIENT_MS} | settings))


async def served(world: World, body: Any = COMPLETION, **headers: str) -> RouteDecided:
    """A request that gets its answer; the (last) decision about it."""
    request_id = secrets.token_hex(8)
    async with world.post(body, x_request_id=request_id, **headers) as response:
        assert response.status == 200, await response.text()
        await response.read()

    def decided() -> list[RouteDecided]:
        return [one for one in world.said(RouteDecided) if one.request_id == request_id]

    found: list[RouteDecided] = await until(lambda: decided() if decided() and decided()[-1].decode_id else [])
    return found[-1]


async def counted(world: World, name: str, **labels: str) -> float:
    """A metric of the router; 0 where it is not there."""
    async with world.http.get(world.router.url + "/metrics") as response:
        text = await response.text()
    for line in text.splitlines():
        if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return 0.0


async def outcome(world: World, guest: Guest, what: str, kind: str = "guest") -> None:
    """Wait until that outcome has been counted."""
    async with asyncio.timeout(10):
        while not await counted(world, f"kvbus_router_{kind}_answers_total", guest=guest.name, outcome=what):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# Deciding


async def test_the_guest_decides_and_the_decision_says_so(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    await fleet(world, guest=guest.name)
    for _ in range(3):
        decided = await served(world)
        assert (decided.policy, decided.reason) == (f"guest {guest.name}", "last")
        assert (decided.prefill_id, decided.decode_id) == ("prefill-1", "decode-1")
    await outcome(world, guest, "used")
    assert await counted(world, "kvbus_router_decisions_total", arm="main", by=f"guest {guest.name}") == 3
    assert await counted(world, "kvbus_router_guest_seconds_count", guest=guest.name) == 3


async def test_the_guest_sees_what_a_policy_would_see(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    await fleet(world, guest=guest.name)
    decided = await served(world, COMPLETION | {"model": "tiny"})
    asked = guest.asked[0]
    assert asked.engines == decided.engines
    assert [view.engine_id for view in asked.engines] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert (asked.request_id, asked.transfer_id) == (decided.request_id, decided.transfer_id)
    assert (asked.model, asked.part, asked.asked, asked.shadow) == ("tiny", "both", None, False)
    assert asked.deadline_ms == PATIENT_MS
    assert asked.prompt_bytes == decided.prompt_bytes


@pytest.mark.parametrize("mode", ["early", "deferred", "local"])
async def test_the_mode_that_the_client_asks_for_is_asked_of_the_guest(world: World, guest_of: Any, mode: str) -> None:
    guest = await guest_of()
    await fleet(world, guest=guest.name)
    decided = await served(world, x_kvbus_mode=mode)
    assert (decided.mode, decided.asked) == (mode, mode)
    assert decided.policy == f"guest {guest.name}"
    parts = [(one.asked, one.part) for one in guest.asked]
    assert parts == [(mode, "both")] + ([("deferred", "decode")] if mode == "deferred" else [])


async def test_questions_of_several_routers_are_kept_apart(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    first = await fleet(world, guest=guest.name)
    second = await world.start(guest=guest.name, guest_deadline_ms=PATIENT_MS)
    for router in (first, second) * 3:
        world.router = router
        decided = await served(world)
        assert (decided.source, decided.policy) == (router.name, f"guest {guest.name}")
    assert [asked.source for asked in guest.asked] == [first.name, second.name] * 3


async def test_a_slow_guest_holds_up_nobody_else(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    go = asyncio.Event()
    waiting: set[asyncio.Task[None]] = set()

    async def later(asking: Guest, asked: RouteAsked) -> None:
        task = asyncio.create_task(answering(after=go)(asking, asked))
        waiting.add(task)

    guest.act = later
    await fleet(world, guest=guest.name)
    requests = [asyncio.create_task(served(world)) for _ in range(20)]
    await until(lambda: len(guest.asked) == 20)
    async with world.http.get(world.router.url + "/health") as response:
        assert response.status == 200
    go.set()
    assert {one.policy for one in await asyncio.gather(*requests)} == {f"guest {guest.name}"}
    await asyncio.gather(*waiting)


# Rude guests


RUDE = {
    "unknown_engine": answering(decode_id="nobody"),
    "wrong": answering(mode="local"),
    "undecodable": saying(b"\xc1garbage"),
    "huge": saying(encode(RouteAnswered(ask_id="x", prefill_id="", decode_id="")) + b"x" * 600_000),
    "another kind": saying(encode(RouteDecided(transfer_id="t", request_id="r", mode="early", policy="", reason=""))),
    "another name": saying(encode(RouteAnswered(ask_id="x", prefill_id="", decode_id="", source="somebody"))),
}


@pytest.mark.parametrize("kind", RUDE)
async def test_a_rude_answer_costs_no_request_and_no_wait_for_the_deadline(
    world: World, guest_of: Any, kind: str
) -> None:
    guest = await guest_of()
    guest.act = RUDE[kind]
    await fleet(world, guest=guest.name, guest_deadline_ms=60_000.0)
    decided = await served(world)
    assert decided.policy == "round_robin"
    assert f"fallback from guest {guest.name}: answered" in decided.reason
    await outcome(world, guest, kind if kind in {"unknown_engine", "wrong"} else "undecodable")


async def test_a_silent_guest_costs_the_deadline_then_it_rests_then_it_is_tried_again(
    world: World, guest_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = await guest_of()
    guest.act = silent
    router = await fleet(world, guest=guest.name, guest_deadline_ms=5.0)
    for _ in range(BREAKER_FAILURES):
        decided = await served(world)
        assert decided.policy == "round_robin"
        assert decided.reason.endswith(f"fallback from guest {guest.name}: no answer within 5 ms")
    decided = await served(world)
    assert decided.reason.endswith(f"it rests after {BREAKER_FAILURES} failures in a row")
    assert len(guest.asked) == BREAKER_FAILURES
    assert await counted(world, "kvbus_router_guest_resting", guest=guest.name) == 1
    router.guests._asks._breakers[guest.name]._rests_until_s = 0.0  # its rest is over
    router.guests._deadline_ms = PATIENT_MS
    guest.act = answering()
    assert (await served(world)).policy == f"guest {guest.name}"
    assert await counted(world, "kvbus_router_guest_resting", guest=guest.name) == 0


async def test_the_log_says_it_once_in_a_while_however_often_it_happens(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    guest.act = answering(decode_id="nobody")
    await fleet(world, guest=guest.name)
    with capture_logs() as logs:
        for _ in range(BREAKER_FAILURES + 2):
            await served(world)
    warnings = [(log["event"], log.get("outcome", "")) for log in logs if log.get("guest") == guest.name]
    assert warnings == [("guest_answer", "unknown_engine"), ("guest_rests", ""), ("guest_answer", "resting")]


async def test_nobody_of_that_name_is_a_fallback(world: World) -> None:
    await fleet(world, guest="nobody-here", guest_deadline_ms=5.0)
    assert "fallback from guest nobody-here: no answer" in (await served(world)).reason


async def test_late_and_double_answers_are_dropped_and_counted(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    go = asyncio.Event()
    guest.act = answering(after=go)
    router = await fleet(world, guest=guest.name, guest_deadline_ms=5.0)
    assert (await served(world)).policy == "round_robin"
    go.set()
    await outcome(world, guest, "late")
    router.guests._deadline_ms = PATIENT_MS
    guest.act = answering(times=3)
    assert (await served(world)).policy == f"guest {guest.name}"
    await outcome(world, guest, "second")


async def test_an_answer_to_somebody_elses_question_is_not_used(world: World, guest_of: Any) -> None:
    guest, thief = await guest_of(), await guest_of()
    stolen = asyncio.Event()

    async def after_the_thief(asking: Guest, asked: RouteAsked) -> None:
        await thief.bus.publish(choice_of(asked, decode_id="decode-0", reason="stolen"), asked.source)
        await thief.bus.barrier()
        stolen.set()
        await answering()(asking, asked)

    guest.act = after_the_thief
    await fleet(world, guest=guest.name)
    decided = await served(world)
    assert stolen.is_set()
    assert (decided.policy, decided.reason) == (f"guest {guest.name}", "last")
    await outcome(world, thief, "stranger")


async def test_a_guest_that_chooses_an_engine_that_has_gone_meanwhile_is_a_fallback(
    world: World, guest_of: Any
) -> None:
    guest = await guest_of()
    router = await fleet(world, guest=guest.name)

    async def too_late(asking: Guest, asked: RouteAsked) -> None:
        router.fleet.card_gone("decode-1", 0.0)
        await answering()(asking, asked)

    guest.act = too_late
    decided = await served(world)
    assert decided.decode_id == "decode-0"
    assert "the engine that it chose has gone meanwhile" in decided.reason


async def test_a_client_that_leaves_while_the_guest_thinks_leaves_nothing_behind(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    guest.act = silent
    router = await fleet(world, guest=guest.name, guest_deadline_ms=60_000.0)
    request = asyncio.create_task(served(world))
    await until(lambda: guest.asked)
    request.cancel()
    await until(lambda: not router.guests._waiting and not router.gate.in_flight)
    assert not router.guests._asks._open


# Shadows


async def test_shadows_are_asked_the_same_and_only_compared(world: World, guest_of: Any) -> None:
    same, other, rude = await guest_of(), await guest_of(), await guest_of()
    same.act = answering(prefill_id="prefill-0", decode_id="decode-0")
    rude.act = saying(b"\xc1")
    await fleet(world, shadow=(same.name, other.name, rude.name))
    decided = await served(world)
    assert (decided.policy, decided.prefill_id, decided.decode_id) == ("round_robin", "prefill-0", "decode-0")
    for guest, what in ((same, "agreed"), (other, "differed"), (rude, "undecodable")):
        await outcome(world, guest, what, "shadow")
        (asked,) = guest.asked
        assert asked.shadow
        assert (asked.engines, asked.transfer_id) == (decided.engines, decided.transfer_id)
    recorded = [one for one in world.said(RouteAnswered) if one.ask_id == same.asked[0].ask_id]
    assert {one.source for one in recorded} == {same.name, other.name}


async def test_whoever_listens_is_a_shadow_of_all(world: World, guest_of: Any) -> None:
    guests = [await guest_of() for _ in range(3)]
    await fleet(world, shadow="all")
    await served(world)
    for guest in guests:
        await outcome(world, guest, "differed", "shadow")


async def test_a_shadow_that_never_answers_costs_nothing(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    guest.act = silent
    router = await fleet(world, shadow=guest.name, guest_deadline_ms=60_000.0)
    for _ in range(5):
        assert (await served(world)).policy == "round_robin"
    await until(lambda: len(guest.asked) == 5)
    assert not router.guests._waiting


# Canary


async def switched(world: World, canary: Canary | None, ttl_s: float = 60.0) -> None:
    """Set or end the canary, and wait until the router follows."""
    bus = await Bus.connect(BusSettings(nats=world.nats), name="operator", incarnation="i")
    bucket = await bus.bucket(subjects.ROUTING_BUCKET, storage="file")
    if canary is None:
        await bucket.delete(CANARY_KEY)
    else:
        await bucket.put(CANARY_KEY, encoded(canary), ttl_s=ttl_s)
    await bus.close()
    await until(lambda: world.router.guests.canary == canary, 10)


@pytest.fixture
async def no_canary(world: World) -> AsyncIterator[None]:
    yield
    await switched(world, None)


@pytest.mark.usefixtures("no_canary")
async def test_a_canary_is_switched_on_and_off_while_the_router_runs(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    await fleet(world)
    assert (await served(world)).canary is False
    await switched(world, Canary(guest=guest.name, share=1.0))
    decided = await served(world)
    assert (decided.canary, decided.policy) == (True, f"guest {guest.name}")
    assert await counted(world, "kvbus_router_canary_share") == 1.0
    assert await counted(world, "kvbus_router_decisions_total", arm="canary", by=f"guest {guest.name}") == 1
    await switched(world, None)
    assert (await served(world)).policy == "round_robin"
    assert await counted(world, "kvbus_router_canary_share") == 0.0


@pytest.mark.usefixtures("no_canary")
async def test_a_conversation_is_not_torn_between_canary_and_policy(world: World, guest_of: Any) -> None:
    guest = await guest_of()
    await fleet(world)
    await switched(world, Canary(guest=guest.name, share=0.5))
    arms: dict[int, set[bool]] = {}
    for number in range(12):
        body = COMPLETION | {"conversation_id": f"c{number}"}
        arms[number] = {(await served(world, body)).canary for _ in range(2)}
    assert all(len(arm) == 1 for arm in arms.values())
    assert {next(iter(arm)) for arm in arms.values()} == {True, False}


@pytest.mark.usefixtures("no_canary")
async def test_a_canary_may_be_a_policy_that_is_installed(world: World) -> None:
    await fleet(world)
    await switched(world, Canary(policy="least_loaded", share=1.0))
    decided = await served(world)
    assert (decided.canary, decided.policy) == (True, "least_loaded")


async def test_a_canary_ends_by_itself_when_its_time_is_up(world: World) -> None:
    await fleet(world)
    await switched(world, Canary(policy="least_loaded", share=1.0), ttl_s=1.0)
    await until(lambda: world.router.guests.canary is None, 15)
    assert (await served(world)).policy == "round_robin"


async def test_a_canary_that_cannot_be_is_refused_and_the_router_goes_on(world: World) -> None:
    router = await fleet(world)
    router.guests._on_canary(CANARY_KEY, b'{"policy": "not_installed", "share": 1.0}')
    assert router.guests.canary is None
    assert (await served(world)).policy == "round_robin"
