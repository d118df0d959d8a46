"""Roles on a real nats-server with the generated permissions: nobody can do more than his work."""

import json
import secrets
import time
from collections.abc import Iterator

import pytest
from tests.auth_world import PARTIES, Ears, World, announce, secured

from kvbus.auth.roles import SAYS, Party
from kvbus.bus import Bus, DeniedError
from kvbus.errors import BusError
from kvbus_schemas import CancelOrdered, LoadReported, Message, encode, subjects

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


KEYS_OF = {
    "matcher": (subjects.LEASES_BUCKET, "matcher"),
    "reuse": (subjects.CONVERSATIONS_BUCKET, "c"),
    "router": ("kvbus_secrets", "conversations"),
}
"""The bucket and key that a role may write, where it is not an engine's card."""
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


@pytest.mark.parametrize("party", PARTIES, ids=lambda party: party.name)
async def test_nobody_wipes_anothers_keys(world: World, party: Party) -> None:
    """A roll-up header on a write to one's own key would remove all that the bucket holds."""
    own_bucket, own_key = KEYS_OF.get(party.role, (subjects.ENGINES_BUCKET, party.name))
    async with world.bus("d1") as d1, world.bus(party.name) as bus:
        await announce(d1, "d1")
        for rollup in ("all", "sub"):
            headers = {"Nats-TTL": "5", "Nats-Rollup": rollup}
            with pytest.raises(BusError, match=r"rollup not permitted|does not let"):
                await bus._jetstream.put(f"$KV.{own_bucket}.{own_key}", b"x", headers)
        if party.role != "operator":
            for call in (f"STREAM.PURGE.KV_{own_bucket}", f"STREAM.MSG.DELETE.KV_{own_bucket}"):
                with pytest.raises(DeniedError):
                    await bus._jetstream.api(call, {"seq": 1})
    async with world.bus("observer") as observer:
        assert await (await observer.bucket(subjects.ENGINES_BUCKET)).get("d1") is not None


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


async def test_the_past_and_the_buckets_believe_no_copy(world: World) -> None:
    """JetStream sends what somebody has stored to a subject of the trace, or over another's key: neither counts."""
    transfer_id, conversation = fresh(), fresh()
    forged = CancelOrdered(source="matcher-0", transfer_id=transfer_id, reason="forged")
    async with world.bus("d1") as d1, world.bus("reuse-0") as thief, world.bus("matcher-0") as matcher_bus:
        await announce(d1, "d1")
        seen: list[tuple[str, bytes | None]] = []
        watched = await matcher_bus.bucket(subjects.ENGINES_BUCKET)
        watch = await watched.watch(lambda key, value: seen.append((key, value)), "d1")
        stored = f"$KV.{subjects.CONVERSATIONS_BUCKET}.{conversation}"
        await thief._jetstream.put(stored, encode(forged), {})
        body = json.dumps({"last_by_subj": stored}).encode()
        for to in (subjects.subject_of(forged, sender="matcher-0", to="d0"), f"$KV.{subjects.ENGINES_BUCKET}.d1"):
            await thief._link._send(f"$JS.API.DIRECT.GET.KV_{subjects.CONVERSATIONS_BUCKET}", body, to, None)
        await thief.barrier()
        past = Ears()
        await matcher_bus.catch_up("kvbus.v1.transfer.>", past)
        assert not [message for message in past.heard if message.key == transfer_id]
        async with world.bus("observer") as observer:
            cards = await observer.bucket(subjects.ENGINES_BUCKET)
            assert await cards.get("d1") is None, "what stands there is nobody's"
            assert "d1" not in await cards.keys()
            await announce(d1, "d1")
            assert await cards.get("d1") is not None, "its owner writes it again"
        await watch.stop()
        assert {value is not None for _, value in seen} == {True}, "to watchers the engine was there all the time"


async def test_a_consumer_cannot_be_made_to_speak_in_anothers_name(world: World) -> None:
    """Everybody may watch the cards; what a watch delivers goes to where somebody listens to just that subject."""
    forged = CancelOrdered(source="matcher-0", transfer_id=fresh(), reason="forged")
    async with world.bus("d0") as thief, world.bus("d1") as d1:
        ears = Ears()
        await d1.subscribe(subjects.addressed_to("d1"), ears)
        await thief._jetstream.put(f"$KV.{subjects.ENGINES_BUCKET}.d0", encode(forged), {"Nats-TTL": "60"})
        consumer = {
            "name": "thief",
            "deliver_subject": subjects.subject_of(forged, sender="matcher-0", to="d1"),
            "deliver_policy": "all",
            "ack_policy": "none",
            "filter_subject": f"$KV.{subjects.ENGINES_BUCKET}.>",
        }
        call = f"CONSUMER.CREATE.KV_{subjects.ENGINES_BUCKET}.thief.$KV.{subjects.ENGINES_BUCKET}.>"
        body = {"stream_name": f"KV_{subjects.ENGINES_BUCKET}", "config": consumer, "action": "create"}
        await thief._jetstream.api(call, body)
        await d1.publish(cancel("d" * 32), "d1")
        await ears.one(CancelOrdered)
        await d1.barrier()
        assert forged.key not in {message.key for message in ears.heard}
