"""Roles on a real nats-server with the generated permissions: each can do its work; keys that are none are refused."""

import asyncio
import functools
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.auth_world import PARTIES, Ears, World, announce, running, secured
from tests.router_world import until

from kvbus.auth.conf import TlsFiles
from kvbus.auth.provision import provision
from kvbus.auth.seeds import new_seed
from kvbus.auth.setup import Access
from kvbus.bus import Bus, BusSettings
from kvbus.conversations_client import ReuseClient, shared_secret
from kvbus.embedded import EmbeddedNats
from kvbus.errors import BusError, ConfigError
from kvbus.matcher import main as matcher
from kvbus.matcher.settings import MatcherSettings
from kvbus.process import NAME_ENV, process_name
from kvbus.reuse import main as reuse
from kvbus.reuse.settings import ReuseSettings
from kvbus_schemas import (
    BlocksReady,
    BlocksRegistered,
    LoadReported,
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


async def test_a_guest_hears_what_is_for_it_or_for_all_and_answers_in_its_own_name(world: World) -> None:
    async with world.bus("chooser") as chooser, world.bus("router-0") as router:
        answers, heard = Ears(), Ears()
        await router.subscribe(subjects.of_kind(RouteAnswered, to="router-0"), answers)
        for to in ("chooser", "all"):
            await chooser.subscribe(subjects.of_kind(RouteAsked, to=to), heard)
            asked = RouteAsked(ask_id=fresh(), request_id="r", model="m", prompt_bytes=1, engines=[], deadline_ms=50.0)
            await router.publish(asked, to)
            assert (await heard.one(RouteAsked)).source == "router-0"
            await chooser.publish(RouteAnswered(ask_id=asked.ask_id, prefill_id="p0", decode_id="d0"), "router-0")
            assert (await answers.one(RouteAnswered)).source == "chooser"
            answers.heard.clear()
            heard.heard.clear()
        for bus in (chooser, router):
            await bus.barrier()
            assert bus.counters.permission_errors == 0


@pytest.mark.parametrize(
    "subject", [subjects.of_kind(RouteAsked), subjects.of_kind(RouteAsked, to="chooser"), subjects.everything()]
)
async def test_a_guest_cannot_hear_what_others_are_asked(world: World, subject: str) -> None:
    async with world.bus("rival") as rival:
        with pytest.raises(BusError, match="subscribe"):
            await rival.subscribe(subject, Ears())


async def test_a_guest_answers_for_nobody_else(world: World) -> None:
    async with world.bus("rival") as rival:
        forged = RouteAnswered(ask_id=fresh(), prefill_id="p0", decode_id="d0")
        await rival._link.publish(subjects.subject_of(forged, sender="chooser", to="router-0"), encode(forged))
        with pytest.raises(BusError, match="publish"):
            await rival.barrier()


async def test_routers_watch_the_canary_and_only_the_operator_sets_it(world: World) -> None:
    async with world.bus("router-0") as router, world.bus("operator") as operator:
        seen: dict[str, bytes | None] = {}
        bucket = await router.bucket(subjects.ROUTING_BUCKET)
        await bucket.watch(lambda key, value: seen.update({key: value}))
        await (await operator.bucket(subjects.ROUTING_BUCKET)).put("canary", b"{}", ttl_s=60)
        await until(lambda: "canary" in seen)
        with pytest.raises(BusError):
            await bucket.put("canary", b"mine", ttl_s=60)


async def test_an_observer_sees_everything_live_and_past(world: World) -> None:
    async with world.bus("observer") as observer, world.bus("p0") as p0:
        ears, past = Ears(), Ears()
        await observer.subscribe(subjects.everything(), ears)
        await p0.publish(LoadReported(engine_id="p0", running=0, waiting=0, free_blocks=1, total_blocks=1), "all")
        assert (await ears.one(LoadReported)).source == "p0"
        assert await observer.catch_up(subjects.of_kind(LoadReported), past) > 0
        assert past.heard
        await (await observer.bucket(subjects.ENGINES_BUCKET)).entries()


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


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate that is its own authority, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=kvbus"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_with_tls_a_process_shows_its_certificate_and_its_key(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    access = Access(tmp_path / "auth")
    access.write(PARTIES, TlsFiles(str(cert), str(key), str(cert)))
    with EmbeddedNats(config_file=access.conf) as server:
        plain = BusSettings(
            nats=server.url, nkey_seed_file=str(access.seed_file("operator")), connect_timeout_s=1, tls_ca=str(cert)
        )
        bus = await Bus.connect(replace(plain, tls_cert=str(cert), tls_key=str(key)), name="operator", incarnation="1")
        await provision(bus)
        await bus.close()
        with pytest.raises(BusError):
            await Bus.connect(plain, name="operator", incarnation="1")
