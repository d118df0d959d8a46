"""Reuse processes on a real nats-server: claims, restarts, lifetimes, engines that go, hostile messages, lost NATS."""

import asyncio
import contextlib
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvbus.bus import Bus, BusSettings
from kvbus.conversations import conversation_key
from kvbus.conversations_client import ReuseClient, shared_secret
from kvbus.embedded import EmbeddedNats
from kvbus.errors import ConfigError
from kvbus.local.ports import free_port
from kvbus.reuse.service import ReuseService
from kvbus.reuse.settings import ReuseSettings
from kvbus_schemas import (
    AnyMessage,
    EngineCard,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    subjects,
)

pytestmark = pytest.mark.nats
REPLICAS = 2
PATIENT_S = 5.0
SCRIPT = "import typer; from kvbus.cli import reuse; app = typer.Typer(); reuse.register(app); app()"


def fresh() -> str:
    return secrets.token_hex(16)


class Replicas:
    """The reuse processes of one bus, started as a user does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.metrics_port = free_port()
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for number in range(REPLICAS):
            command = [sys.executable, "-c", SCRIPT, "--nats", self.url]
            command += ["--metrics-port", str(self.metrics_port)] if number == 0 else []
            self.running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def kill(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        self.running.clear()


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with EmbeddedNats() as server:
        found = Replicas(server.url)
        found.start()
        yield found
        found.kill()


class Engine:
    """A decode engine as far as the bus sees it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.heard: list[ReuseReleased] = []
        self.offers = 0

    @classmethod
    async def start(cls, url: str, *, name: str = "", incarnation: str = "i1") -> "Engine":
        name = name or f"decode-{secrets.token_hex(4)}"
        engine = cls(await Bus.connect(BusSettings(nats=url), name=name, incarnation=incarnation))
        await engine.bus.subscribe(subjects.of_kind(ReuseReleased, to=name), engine._hear)
        await engine.announce()
        return engine

    async def announce(self) -> None:
        card = EngineCard(
            engine_id=self.bus.name, role="decode", model="m", http_url="http://h", block_size=16, num_blocks=99
        )
        cards = await self.bus.bucket(subjects.ENGINES_BUCKET)
        await cards.put(self.bus.name, msgspec.msgpack.encode(self.bus.envelope(card)), ttl_s=300)

    def offer(self, conversation: str, **given: Any) -> ReuseOffered:
        self.offers += 1
        seq = given.pop("seq", self.offers)
        offer = ReuseOffered(
            conversation=conversation, offer_id=f"{self.bus.incarnation}-{seq}", offer_seq=seq,
            engine_id=self.bus.name, block_count=7, block_size=16, token_count=100, chain=[b"12345678"] * 7,
            remaining_s=480.0,
        )  # fmt: skip
        return replace(offer, **given)

    async def offers_now(self, conversation: str, **given: Any) -> ReuseOffered:
        """Publish an offer; return it once it is kept."""
        offer = self.offer(conversation, **given)
        await self.bus.publish(offer, "reuse")
        await kept(self.bus, offer)
        return offer

    async def hears(self, offer: ReuseOffered, reason: str) -> None:
        await until(lambda: any((r.offer_id, r.reason) == (offer.offer_id, reason) for r in self.heard))

    def _hear(self, message: AnyMessage) -> None:
        assert isinstance(message, ReuseReleased)
        self.heard.append(message)


async def until(holds: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for another process's doing."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  (no event of ours tells it)
            await asyncio.sleep(0.01)


async def kept(bus: Bus, offer: ReuseOffered, within_s: float = 10.0) -> None:
    """Wait until the bucket holds the offer."""
    bucket = await bus.bucket(subjects.CONVERSATIONS_BUCKET, storage="file", ttl_hint_s=3600.0)
    async with asyncio.timeout(within_s):
        while True:
            entry = await bucket.get(offer.conversation)
            if entry is not None and offer.offer_id.encode() in entry.value:
                return
            await asyncio.sleep(0.01)


@pytest.fixture
async def engine(replicas: Replicas) -> AsyncIterator[Engine]:
    engine = await Engine.start(replicas.url)
    await ready(engine.bus)
    yield engine
    await engine.bus.close()


@pytest.fixture
async def router(replicas: Replicas) -> AsyncIterator[ReuseClient]:
    bus = await Bus.connect(BusSettings(nats=replicas.url), name="router-1", incarnation="r1")
    client = ReuseClient(bus)
    yield client
    await client.close()
    await bus.close()


async def ready(bus: Bus, replicas: int = REPLICAS) -> None:
    """Wait until so many processes answer."""
    client, answered = ReuseClient(bus), set[str]()
    async with asyncio.timeout(60):  # a process takes long to start on a busy machine
        while len(answered) < replicas:
            answer = await client.ask(fresh(), 0.5, claim=False)
            answered |= {answer.source} - {""}
    await client.close()


async def ask(client: ReuseClient, conversation: str, *, claim: bool = True) -> ReuseAnswered:
    return await client.ask(conversation, PATIENT_S, claim=claim)


async def settles(client: ReuseClient, conversation: str, miss: str) -> None:
    """Wait until every replica, as far as six looks in a row can tell, gives this reason."""
    async with asyncio.timeout(10):
        in_a_row = 0
        while in_a_row < 6:
            in_a_row = in_a_row + 1 if (await ask(client, conversation, claim=False)).miss == miss else 0


async def test_an_offer_is_granted_once_with_a_new_transfer_id_and_then_it_is_claimed(
    engine: Engine, router: ReuseClient
) -> None:
    offer = await engine.offers_now(fresh())
    looked = (await ask(router, offer.conversation, claim=False)).grant
    answer = await ask(router, offer.conversation)
    assert looked is not None
    assert answer.grant is not None
    assert (answer.grant.offer_id, answer.grant.holder_id) == (offer.offer_id, engine.bus.name)
    assert (answer.grant.holder_incarnation, answer.grant.chain) == ("i1", offer.chain)
    assert len(answer.grant.transfer_id) == 32
    assert {(await ask(router, offer.conversation)).miss for _ in range(4)} == {"claimed"}


async def test_of_a_hundred_claims_at_once_over_two_replicas_one_wins(engine: Engine, router: ReuseClient) -> None:
    for _ in range(3):
        offer = await engine.offers_now(fresh())
        answers = await asyncio.gather(*(ask(router, offer.conversation) for _ in range(100)))
        assert len([answer for answer in answers if answer.grant is not None]) == 1
        assert {answer.miss for answer in answers if answer.grant is None} == {"claimed"}
        assert len({answer.source for answer in answers}) == REPLICAS


async def test_an_offer_can_be_claimed_as_soon_as_it_is_heard_and_still_only_once(
    engine: Engine, router: ReuseClient
) -> None:
    """A turn that follows within a millisecond finds what its predecessor has left."""
    for _ in range(50):
        offer = engine.offer(fresh())
        await engine.bus.publish(offer, "reuse")
        await engine.bus.barrier()  # as a client hears of a turn's end: after its offer was sent
        first, second = await asyncio.gather(ask(router, offer.conversation), ask(router, offer.conversation))
        assert sorted([first.miss or "", second.miss or ""]) == ["", "claimed"]
        await engine.bus.publish(offer, "reuse")
        assert (await ask(router, offer.conversation)).miss == "claimed"
    assert engine.heard == []


async def test_kv_of_another_layout_is_incompatible_and_stays(engine: Engine, router: ReuseClient) -> None:
    offer = await engine.offers_now(fresh(), compat_hash="old")
    answer = await router.ask(offer.conversation, PATIENT_S, compat_hash="new")
    assert (answer.miss, answer.grant) == ("incompatible", None)
    assert (await router.ask(offer.conversation, PATIENT_S, compat_hash="old")).grant is not None


async def test_a_newer_offer_replaces_the_older_one_and_its_holder_is_told(
    replicas: Replicas, engine: Engine, router: ReuseClient
) -> None:
    conversation = fresh()
    first = await engine.offers_now(conversation)
    second = await engine.offers_now(conversation)
    await engine.hears(first, "replaced")
    other = await Engine.start(replicas.url)
    third = await other.offers_now(conversation)
    await engine.hears(second, "replaced")
    answer = await ask(router, conversation)
    assert answer.grant is not None
    assert (answer.grant.offer_id, answer.grant.holder_id) == (third.offer_id, other.bus.name)
    await other.bus.close()


async def test_an_older_offer_that_arrives_late_and_a_repeat_change_nothing(
    engine: Engine, router: ReuseClient
) -> None:
    conversation, marker = fresh(), fresh()
    older, newer = engine.offer(conversation), await engine.offers_now(conversation)
    for message in (older, newer, older, newer) * 5:
        await engine.bus.publish(message, "reuse")
    await engine.offers_now(marker)
    await asyncio.sleep(0.1)
    answer = await ask(router, conversation)
    assert answer.grant is not None
    assert answer.grant.offer_id == newer.offer_id
    for message in (older, newer) * 5:
        await engine.bus.publish(message, "reuse")
    await asyncio.sleep(0.2)
    assert (await ask(router, conversation)).miss == "claimed"
    assert engine.heard == []


async def test_lifetimes_end_on_time_whatever_was_looked_up_or_repeated(engine: Engine, router: ReuseClient) -> None:
    offered_s = monotonic()
    offer = await engine.offers_now(fresh(), remaining_s=2.4)
    kept_s, looks = monotonic(), 0
    while True:
        looked = await ask(router, offer.conversation, claim=False)
        if monotonic() > offered_s + 2.4 - 1.0:  # the margin
            break
        assert looked.grant is not None
        looks += 1
        await engine.bus.publish(replace(offer, remaining_s=480.0), "reuse")
        await asyncio.sleep(0.1)
    assert looks > 2
    await asyncio.sleep(max(0.0, kept_s + 2.4 - 1.0 - monotonic()))
    asked_s = monotonic()
    assert (await ask(router, offer.conversation)).miss == "expired"
    assert monotonic() - asked_s < 1.0
    await asyncio.sleep(1.8)
    assert (await ask(router, offer.conversation)).miss in ("expired", "new")


async def test_an_engine_that_is_gone_or_has_restarted_grants_nothing_and_its_keys_go(
    replicas: Replicas, engine: Engine, router: ReuseClient
) -> None:
    offers = [await engine.offers_now(fresh()) for _ in range(2)]
    reborn = await Engine.start(replicas.url, name=engine.bus.name, incarnation="i2")
    await settles(router, offers[0].conversation, "engine_gone")
    assert (await ask(router, offers[0].conversation)).miss == "engine_gone"
    bucket = await engine.bus.bucket(subjects.CONVERSATIONS_BUCKET)
    assert await bucket.get(offers[0].conversation) is None
    newer = await reborn.offers_now(fresh())
    cards = await engine.bus.bucket(subjects.ENGINES_BUCKET)
    await cards.delete(engine.bus.name)
    await settles(router, newer.conversation, "engine_gone")
    assert (await ask(router, newer.conversation)).miss == "engine_gone"
    await reborn.bus.close()


async def test_a_withdrawal_is_known_to_every_replica_even_when_it_overtakes_its_offer(
    engine: Engine, router: ReuseClient
) -> None:
    offer = await engine.offers_now(fresh())
    withdrawn = ReuseWithdrawn(
        conversation=offer.conversation, offer_id=offer.offer_id, engine_id=engine.bus.name, reason="evicted"
    )
    await engine.bus.publish(withdrawn, "reuse")
    await settles(router, offer.conversation, "withdrawn")
    early = engine.offer(fresh())
    await engine.bus.publish(replace(withdrawn, conversation=early.conversation, offer_id=early.offer_id), "reuse")
    await settles(router, early.conversation, "withdrawn")
    await engine.bus.publish(early, "reuse")
    await asyncio.sleep(0.2)
    assert (await ask(router, early.conversation)).miss == "withdrawn"


async def test_too_few_tokens_are_released_at_once(engine: Engine, router: ReuseClient) -> None:
    offer = await engine.offers_now(fresh(), token_count=63, chain=[b"12345678"] * 4)
    await engine.hears(offer, "too_short")
    assert (await ask(router, offer.conversation)).miss == "too_short"


async def test_bad_messages_stop_nothing_and_nobody_speaks_for_another_engine(
    engine: Engine, router: ReuseClient
) -> None:
    good = await engine.offers_now(fresh())
    bad = [
        replace(engine.offer(fresh()), engine_id="somebody-else"),
        replace(engine.offer(fresh()), remaining_s=float("nan")),
        replace(engine.offer(fresh()), token_count=-5),
        replace(engine.offer("not-a-key")),
        replace(good, engine_id="somebody-else", offer_seq=10_000, offer_id="stolen"),
    ]
    for message in bad:
        await engine.bus.publish(message, "reuse")
    for event in ("reuse_offered", "reuse_asked", "reuse_withdrawn"):
        subject = f"kvbus.v1.reuse.{event}.{engine.bus.name}.reuse.{good.conversation}"
        for data in (b"", b"\xc1", b"\x80", b"x" * 10_000):
            await engine.bus._link.publish(subject, data)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await engine.bus.request(ReuseAsked(conversation="not-a-key"), "reuse", timeout_s=PATIENT_S)
    answer = await ask(router, good.conversation)
    assert answer.grant is not None
    assert answer.grant.holder_id == engine.bus.name
    assert {(await ask(router, message.conversation)).miss for message in bad[:3]} == {"new"}


async def test_tenants_never_meet_whatever_their_ids(engine: Engine, router: ReuseClient) -> None:
    secret = await shared_secret(engine.bus)
    ids = ["same", "*", ">", "a.b", "\x00\n", "x" * 10_240]
    for name in ids:
        await engine.offers_now(conversation_key("tenant-a", name, secret))
    assert {(await ask(router, conversation_key("tenant-b", name, secret))).miss for name in ids} == {"new"}
    for name in ids:
        assert (await ask(router, conversation_key("tenant-a", name, secret))).grant is not None


async def test_all_routers_agree_on_one_secret(replicas: Replicas) -> None:
    buses = [await Bus.connect(BusSettings(nats=replicas.url), name=f"router-{n}", incarnation="1") for n in range(4)]
    assert len(set(await asyncio.gather(*(shared_secret(bus) for bus in buses)))) == 1
    assert await shared_secret(buses[0], "given by the user") == b"given by the user"
    with pytest.raises(ConfigError, match="16 bytes"):
        await shared_secret(buses[0], "short")
    for bus in buses:
        await bus.close()


async def test_a_claim_that_is_granted_too_late_is_let_go(engine: Engine, router: ReuseClient) -> None:
    offer = await engine.offers_now(fresh())
    assert (await router.ask(offer.conversation, 0.0)).miss == "unavailable"
    await engine.hears(offer, "late")
    assert router.late == 1


async def test_a_cancelled_asker_leaves_no_claim_behind(engine: Engine, router: ReuseClient) -> None:
    offer = await engine.offers_now(fresh())
    asking = asyncio.create_task(router.ask(offer.conversation, PATIENT_S))
    await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await engine.hears(offer, "late")


async def test_metrics_count_offers_questions_and_misses_by_reason(
    replicas: Replicas, engine: Engine, router: ReuseClient
) -> None:
    for _ in range(20):
        offer = await engine.offers_now(fresh())
        await ask(router, offer.conversation)
        await ask(router, offer.conversation)

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{replicas.metrics_port}/metrics") as reply:
            return str(reply.read().decode())

    text = await asyncio.to_thread(read)
    for line in (
        'kvbus_reuse_offers_total{event="stored"}', "kvbus_reuse_asks_total", "kvbus_reuse_grants_total",
        'kvbus_reuse_misses_total{reason="claimed"}', "kvbus_reuse_claims_lost_total", "kvbus_reuse_keys",
    ):  # fmt: skip
        assert line in text


async def test_a_restart_of_all_replicas_keeps_offers_and_claims_and_finds_what_was_offered_meanwhile(
    replicas: Replicas, engine: Engine, router: ReuseClient
) -> None:
    offers = [await engine.offers_now(fresh()) for _ in range(3)]
    claimed = offers.pop()
    assert (await ask(router, claimed.conversation)).grant is not None
    replicas.kill()
    assert (await router.ask(offers[0].conversation, 0.05)).miss == "unavailable"
    meanwhile = engine.offer(fresh())
    gone = ReuseWithdrawn(
        conversation=offers[0].conversation, offer_id=offers[0].offer_id, engine_id=engine.bus.name, reason="evicted"
    )
    await engine.bus.publish(meanwhile, "reuse")
    await engine.bus.publish(gone, "reuse")
    replicas.start()
    await ready(engine.bus)
    await kept(engine.bus, meanwhile)
    assert (await ask(router, claimed.conversation)).miss == "claimed"
    assert (await ask(router, offers[1].conversation)).grant is not None
    assert (await ask(router, meanwhile.conversation)).grant is not None
    assert (await ask(router, offers[0].conversation)).miss == "withdrawn"


async def test_while_nats_is_down_the_router_hears_unavailable_in_time_and_afterwards_all_is_there() -> None:
    with EmbeddedNats() as server:
        bus = await Bus.connect(BusSettings(nats=server.url), name="reuse-1", incarnation="1")
        await ReuseService(bus, ReuseSettings()).start()
        engine = await Engine.start(server.url)
        client = ReuseClient(engine.bus)
        offer = await engine.offers_now(fresh())
        secret = await shared_secret(bus)
        await asyncio.to_thread(server.kill)
        for _ in range(3):
            asked_s = monotonic()
            assert (await client.ask(fresh())).miss == "unavailable"
            assert monotonic() - asked_s < 0.05 + 0.25
        assert (await ReuseClient(None).ask(fresh())).miss == "unavailable"
        await asyncio.to_thread(server.start)
        await until(lambda: bus.connected and engine.bus.connected)
        await ready(engine.bus, replicas=1)
        assert (await ask(client, offer.conversation)).grant is not None
        assert await shared_secret(engine.bus) == secret
        await client.close()
        await engine.bus.close()
        await bus.close()
