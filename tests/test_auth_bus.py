"""Roles on a real nats-server with the generated permissions: each can do its work, and nothing beyond it."""

import asyncio
import functools
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.auth_world import PARTIES, Ears, World, announce, running, secured

from kvbus.auth.roles import SAYS, Party
from kvbus.auth.seeds import new_seed
from kvbus.bus import Bus, BusSettings, DeniedError
from kvbus.conversations_client import ReuseClient, shared_secret
from kvbus.errors import BusError, ConfigError
from kvbus.matcher import main as matcher
from kvbus.matcher.settings import MatcherSettings
from kvbus.process import NAME_ENV, process_name
from kvbus.reuse import main as reuse
from kvbus.reuse.settings import ReuseSettings
from kvbus_schemas import (
    AnyMessage,
    BlocksReady,
    BlocksRegistered,
    CancelOrdered,
    LoadReported,
    Message,
    PushDone,
    PushOrdered,
    ReuseOffered,
    ReuseReleased,
    RouteAnswered,
    RouteAsked,
    encode,
    subjects,
)

pytestmark = pytest.mark.nats
SOON_S = 1.0
NAMES = [party.name for party in PARTIES]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with secured(tmp_path_factory.mktemp("secured")) as found:
        yield found


def fresh() -> str:
    return secrets.token_hex(16)


def cancel(transfer_id: str = "") -> CancelOrdered:
    return CancelOrdered(transfer_id=transfer_id or fresh(), reason="test")


def load() -> LoadReported:
    return LoadReported(engine_id="p0", running=0, waiting=0, free_blocks=1, total_blocks=1)


async def denied(bus: Bus, message: Message, to: str, *, sender: str) -> None:
    """NATS refuses `message` from `sender` over this connection, and says so soon."""
    started_s = time.monotonic()
    await bus._link.publish(subjects.subject_of(message, sender=sender, to=to), encode(message))
    with pytest.raises(DeniedError):
        await bus.barrier()
    assert time.monotonic() - started_s < SOON_S


# Work


async def test_the_matcher_pairs_what_engines_say_with_their_own_keys(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME_ENV, "matcher-0")
    settings = MatcherSettings(nats=world.server.url, nkey_seed_file=str(world.access.seed_file("matcher-0")))
    t = fresh()
    terms: dict[str, Any] = {"token_count": 20, "prompt_digest": "f00d", "lease_s": 30.0}
    async with (
        running(functools.partial(matcher.serve, settings)),
        world.bus("p0") as p0,
        world.bus("p0", name="p0-r1") as rank,
        world.bus("d0") as d0,
    ):
        at_rank, at_decode = Ears(), Ears()
        await rank.subscribe(subjects.addressed_to("p0"), at_rank)
        await d0.subscribe(subjects.addressed_to("d0"), at_decode)
        await announce(p0, "p0")
        await announce(d0, "d0")
        registered = BlocksRegistered(
            transfer_id=t, producer_id="p0", producer_incarnation="1", consumer_id="d0", consumer_incarnation="1",
            block_ids=[[5, 6]], first_block=0, block_size=16, compat_hash="c", **terms,
        )  # fmt: skip
        await d0.publish(registered, "matcher")
        await p0.publish(BlocksReady(transfer_id=t, producer_id="p0", block_ids=[[1, 2]], **terms), "matcher")
        order = await at_rank.one(PushOrdered)
        assert (order.key, order.source) == (t, "matcher-0")
        done = PushDone(
            transfer_id=t, producer_id="p0", consumer_id="d0", rank=1, ranks=2, ranges=[(0, 2)], bytes=1, duration_ms=1
        )
        await rank.publish(done, "d0")
        assert (await at_decode.one(PushDone)).source == "p0-r1"
        for bus in (p0, rank, d0):
            await bus.barrier()
            assert bus.counters.permission_errors == 0


async def test_reuse_answers_a_router_and_tells_the_holder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME_ENV, "reuse-0")
    settings = ReuseSettings(nats=world.server.url, nkey_seed_file=str(world.access.seed_file("reuse-0")))
    conversation = fresh()
    async with (
        running(functools.partial(reuse.serve, settings)),
        world.bus("d1") as d1,
        world.bus("router-0") as router,
        world.bus("router-1") as other,
    ):
        ears = Ears()
        await d1.subscribe(subjects.addressed_to("d1"), ears)
        await announce(d1, "d1")
        offer = ReuseOffered(
            conversation=conversation, offer_id="o1", offer_seq=1, engine_id="d1", block_count=7, block_size=16,
            token_count=100, chain=[b"12345678"] * 7, remaining_s=60.0,
        )  # fmt: skip
        client = ReuseClient(router)
        async with asyncio.timeout(5):
            while (answer := await client.ask(conversation, 1.0)).grant is None:
                await d1.publish(offer, "reuse")
        assert answer.grant.holder_id == "d1"
        released = ReuseReleased(conversation=conversation, offer_id="o1", transfer_id=fresh(), reason="late")
        await router.publish(released, "d1")
        assert (await ears.one(ReuseReleased)).source == "router-0"
        assert await shared_secret(router) == await shared_secret(other)
        await client.close()
        for bus in (d1, router, other):
            await bus.barrier()


async def test_a_policy_answers_whom_it_hears(world: World) -> None:
    async with world.bus("chooser") as chooser, world.bus("router-0") as router:

        async def choose(asked: AnyMessage) -> RouteAnswered:
            return RouteAnswered(ask_id=asked.key, prefill_id="p0", decode_id="d0")

        await chooser.respond(subjects.of_kind(RouteAsked), choose)
        asked = RouteAsked(ask_id=fresh(), request_id="r", model="m", prompt_bytes=1, engines=[], deadline_ms=50.0)
        for _ in range(3):
            answer = await router.request(asked, "policy", timeout_s=5)
            assert (type(answer), answer.source) == (RouteAnswered, "chooser")


async def test_an_observer_sees_everything_live_and_past(world: World) -> None:
    async with world.bus("observer") as observer, world.bus("p0") as p0:
        ears, past = Ears(), Ears()
        await observer.subscribe(subjects.everything(), ears)
        await p0.publish(load(), "all")
        assert (await ears.one(LoadReported)).source == "p0"
        assert await observer.catch_up(subjects.of_kind(LoadReported), past) > 0
        assert past.heard
        await (await observer.bucket(subjects.ENGINES_BUCKET)).entries()


# Nothing beyond it


@pytest.mark.parametrize("party", PARTIES, ids=lambda party: party.name)
async def test_nobody_speaks_in_anothers_name_or_says_what_is_not_its_to_say(world: World, party: Party) -> None:
    name, role = party.name, party.role
    async with world.bus(name) as bus:
        for other in NAMES:
            if other != name:
                for message in (cancel(), load()):
                    await denied(bus, message, "d0", sender=other)
        if CancelOrdered not in SAYS[role]:
            await denied(bus, cancel(), "d0", sender=name)
        await denied(bus, cancel(), "d0", sender="p0-r0")  # ranks, the engine's own too, only tell of their writes


async def test_an_observer_cannot_publish_and_learns_it_at_once(world: World) -> None:
    async with world.bus("observer") as observer:
        started_s = time.monotonic()
        await observer.publish(cancel(), "p0")
        with pytest.raises(DeniedError, match="observer"):
            await observer.barrier()
        with pytest.raises(DeniedError):
            await observer.request(cancel(), "p0", timeout_s=30)
        bucket = await observer.bucket(subjects.ENGINES_BUCKET)
        for key in ("p0", "observer"):
            with pytest.raises(DeniedError):
                await bucket.put(key, b"x", ttl_s=5)
        assert time.monotonic() - started_s < SOON_S


FOREIGN_KEYS = [
    ("p0", subjects.ENGINES_BUCKET, "d0"),
    ("d0", subjects.ENGINES_BUCKET, "d1"),
    ("matcher-0", subjects.ENGINES_BUCKET, "d0"),
    ("router-0", subjects.ENGINES_BUCKET, "router-0"),
    ("matcher-0", subjects.LEASES_BUCKET, "reuse_heard"),
    ("reuse-0", subjects.LEASES_BUCKET, "matcher"),
]


@pytest.mark.parametrize(("user", "bucket", "key"), FOREIGN_KEYS)
async def test_nobody_writes_anothers_key(world: World, user: str, bucket: str, key: str) -> None:
    async with world.bus(user) as bus:
        opened = await bus.bucket(bucket)
        with pytest.raises(DeniedError):
            await opened.put(key, b"x", ttl_s=5)


@pytest.mark.parametrize("user", ["p0", "d0", "matcher-0", "observer", "chooser"])
async def test_secrets_and_conversations_are_for_those_whose_business_they_are(world: World, user: str) -> None:
    async with world.bus(user) as bus:
        for name in ("kvbus_secrets", subjects.CONVERSATIONS_BUCKET):
            with pytest.raises(DeniedError):
                await bus.bucket(name)
            with pytest.raises(DeniedError):
                await bus._jetstream.last(f"KV_{name}", f"$KV.{name}.conversations")


HEARING = [
    ("p0", subjects.everything()),
    ("p0", subjects.addressed_to("d0")),
    ("d0", subjects.addressed_to("reuse")),
    ("d0", subjects.everything_about("a" * 32)),
    ("d0", "$KV.kvbus_conversations.>"),
    ("router-0", "kvbus.v1.reuse.>"),
    ("router-0", "_INBOX_router-1.>"),
    ("matcher-0", "kvbus.v1.reuse.>"),
    ("reuse-0", "kvbus.v1.route.>"),
    ("observer", "_INBOX_p0.>"),
]


@pytest.mark.parametrize(("user", "subject"), HEARING)
async def test_nobody_hears_what_is_for_others(world: World, user: str, subject: str) -> None:
    async with world.bus(user) as bus:
        with pytest.raises(DeniedError, match="subscribe"):
            await bus.subscribe(subject, lambda message: None)


@pytest.mark.parametrize("user", [name for name in NAMES if name != "operator"])
async def test_only_the_operator_makes_changes_or_removes_streams(world: World, user: str) -> None:
    async with world.bus(user) as bus:
        for call in ("STREAM.CREATE.X", "STREAM.UPDATE.KVBUS", "STREAM.DELETE.KVBUS", "STREAM.PURGE.KVBUS"):
            started_s = time.monotonic()
            with pytest.raises(DeniedError):
                await bus._jetstream.api(call, {"name": "X", "subjects": ["x"]})
            assert time.monotonic() - started_s < SOON_S


async def test_marks_in_anothers_name_are_refused(world: World) -> None:
    async with world.bus("observer") as bus:
        await bus._link.publish("kvbus.mark.matcher-0.x", b"9")
        with pytest.raises(DeniedError):
            await bus.barrier()


async def test_jetstream_cannot_be_made_to_speak_in_anothers_name(world: World) -> None:
    """It sends what it has stored to any reply subject; a copy like that reaches no handler."""
    forged = encode(CancelOrdered(source="matcher-0", transfer_id="b" * 32, reason="forged"))
    subject = subjects.subject_of(cancel("b" * 32), sender="matcher-0", to="d0")
    async with world.bus("reuse-0") as thief, world.bus("d0") as d0:
        ears = Ears()
        await d0.subscribe(subjects.addressed_to("d0"), ears)
        leases = await thief.bucket(subjects.LEASES_BUCKET)
        await leases.put("reuse_heard", forged, ttl_s=60)
        body = json.dumps({"last_by_subj": "$KV.kvbus_leases.reuse_heard"}).encode()
        await thief._link._send("$JS.API.DIRECT.GET.KV_kvbus_leases", body, subject, None)
        await d0.publish(cancel("c" * 32), "d0")  # what comes after the copy
        assert (await ears.one(CancelOrdered)).key == "c" * 32
        assert d0.counters.dead_letters == 1
        assert len(ears.heard) == 1


async def test_the_past_holds_nobody_to_what_another_said_in_his_name(world: World) -> None:
    """The stream takes what a process says under its own subject, whoever the envelope names."""
    transfer_id = fresh()
    lie = CancelOrdered(source="matcher-0", transfer_id=transfer_id, reason="forged")
    async with world.bus("d0") as d0, world.bus("matcher-0") as matcher_bus:
        await d0._link.publish(subjects.subject_of(lie, sender="d0", to="p0"), encode(lie))
        await d0._link.publish(subjects.subject_of(cancel(), sender="d0", to="p0"), encode(cancel(transfer_id)))
        await d0.publish(cancel(transfer_id), "p0")
        await d0.barrier()
        past = Ears()
        await matcher_bus.catch_up("kvbus.v1.transfer.>", past)
        assert [m.source for m in past.heard if m.key == transfer_id] == ["d0"]


# Keys


async def test_a_key_that_nats_does_not_know_is_named(world: World) -> None:
    seed_file = world.access.directory / "stranger.nk"
    seed_file.write_text(new_seed())
    with pytest.raises(BusError, match=r"stranger\.nk.*kvbus auth init") as caught:
        await Bus.connect(
            BusSettings(nats=world.server.url, nkey_seed_file=str(seed_file), connect_timeout_s=1),
            name="p0",
            incarnation="1",
        )
    assert seed_file.read_text() not in str(caught.value)
    with pytest.raises(BusError, match="KVBUS_NKEY_SEED_FILE"):
        await Bus.connect(BusSettings(nats=world.server.url, connect_timeout_s=1), name="p0", incarnation="1")


@pytest.mark.parametrize("text", ["", "hello", "S" * 58, "MISTYPED", "é", "SUAM\n\nSUAM"])
async def test_a_bad_seed_is_refused_before_anything_is_sent(world: World, text: str) -> None:
    seed_file = world.access.directory / "bad.nk"
    seed = new_seed()
    seed_file.write_text(seed[:-1] + ("A" if seed[-1] != "A" else "B") if text == "MISTYPED" else text)
    started_s = time.monotonic()
    with pytest.raises(BusError, match=r"bad\.nk holds no nkey seed of a user"):
        await Bus.connect(BusSettings(nats=world.server.url, nkey_seed_file=str(seed_file)), name="p0", incarnation="1")
    assert time.monotonic() - started_s < SOON_S


async def test_a_seed_file_that_is_not_there_is_named(world: World) -> None:
    with pytest.raises(BusError, match=r"cannot read the seed file /nowhere/x\.nk: No such file"):
        await Bus.connect(
            BusSettings(nats=world.server.url, nkey_seed_file="/nowhere/x.nk"), name="p0", incarnation="1"
        )


def test_a_process_takes_its_name_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME_ENV, "router-0")
    assert process_name("router") == "router-0"
    monkeypatch.setenv(NAME_ENV, "router.*")
    with pytest.raises(ConfigError, match=NAME_ENV):
        process_name("router")
    monkeypatch.delenv(NAME_ENV)
    assert process_name("router").startswith("router-")
