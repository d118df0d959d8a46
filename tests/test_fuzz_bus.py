"""Bytes that are no message, and messages from strangers, on every subject of a running fleet: each is counted as a
dead letter by whoever hears it, nobody stops, and the next request is served."""

import asyncio
import random
from pathlib import Path

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg
from tests.light_world import all_quiet, ask

from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus_schemas import KINDS, AnyMessage, DeadLetter, DrainOrdered, Message, decode, encode, subjects

pytestmark = pytest.mark.nats

GOLDEN = Path(__file__).parents[1] / "schemas" / "golden"
RECEIVERS = ("matcher", "reuse", "prefill-0", "decode-0")
PAUSE_S = 0.03
"""Between messages: beyond a hundred in a second, dead letters are counted and not reported."""
HEARD_MAX_S = 10.0
MATCHERS = {"BlocksRegistered", "BlocksReady", "BlocksUnavailable", "TransferClosed", "CancelOrdered"}


class Letters:
    """(who, subject) of every dead letter."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    async def hear(self, msg: Msg) -> None:
        letter = msgspec.msgpack.decode(msg.data, type=DeadLetter)
        self.found.append((letter.source, letter.subject))


def golden(kind: type[Message]) -> AnyMessage:
    """One message of that kind, with all of its fields."""
    return decode((GOLDEN / f"{kind.__name__}.2.bin").read_bytes())


def spoilt(good: bytes, dice: random.Random) -> bytes:
    """What is certainly no message any more."""
    cut = good[: dice.randrange(1, len(good))]
    return dice.choice([b"", dice.randbytes(40) + b"\xc1", cut, b"\xc1" + good, b'{"type": "CancelOrdered"}', b"\x80"])


def subject_of(kind: type[Message], to: str) -> str:
    return subjects.subject_of(golden(kind), sender="stranger", to=to)


async def test_garbage_on_every_subject_is_a_dead_letter_strangers_change_nothing_and_nobody_stops(
    tmp_path: Path,
) -> None:
    dice, letters = random.Random(4), Letters()
    options = FleetOptions(engine="sim", work_dir=tmp_path, engine_settings={"reuse_ttl_s": "3"})
    async with start_fleet(options) as fleet, aiohttp.ClientSession() as http:
        assert fleet.bus is not None
        link = fleet.bus._link
        await link.subscribe(f"{subjects.DEAD_LETTERS}.>", letters.hear, pending_max=10_000)
        for kind in KINDS:
            for to in (*RECEIVERS, "all"):
                await link.publish(subject_of(kind, to), spoilt(encode(golden(kind)), dice))
                await asyncio.sleep(PAUSE_S)
        for key in ("ghost", "prefill-9"):
            bucket = await fleet.bus.bucket(subjects.ENGINES_BUCKET)
            await bucket.put(key, dice.randbytes(60), ttl_s=3)
        await _heard(letters)
        await _strangers_speak(fleet)
        await _serves_as_before(fleet, http)


async def _heard(letters: Letters) -> None:
    """Wait until everybody has reported all that he hears."""
    expected = {(to, subject_of(kind, to)) for kind in KINDS for to in ("prefill-0", "decode-0")}
    async with asyncio.timeout(HEARD_MAX_S):
        while not expected <= set(letters.found):  # noqa: ASYNC110  (what is awaited is other processes' doing)
            await asyncio.sleep(0.05)
    by_matcher = {subject for who, subject in letters.found if who.startswith("matcher-")}
    assert {subject_of(kind, "matcher") for kind in KINDS if kind.__name__ in MATCHERS} <= by_matcher
    assert {who.partition("-")[0] for who, _ in letters.found} >= {"matcher", "reuse", "router", "prefill", "decode"}
    for who in ("prefill-0", "decode-0"):
        once = [subject for source, subject in letters.found if source == who]
        assert len(once) == len(set(once)), "each is counted once"


async def _strangers_speak(fleet: Fleet) -> None:
    """Well-formed messages about transfers and conversations that nobody knows."""
    assert fleet.bus is not None
    for kind in KINDS:
        if kind is DrainOrdered:
            continue  # whoever may say it is obeyed: permissions are for that
        for to in RECEIVERS:
            message = replace(golden(kind), source="stranger", incarnation="s1")
            await fleet.bus._link.publish(subject_of(kind, to), encode(message))


async def _serves_as_before(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    for turn in range(2):
        prompt = "a question of some length " * 20 * (turn + 1)
        answer = await ask(http, fleet.base_url, {"prompt": prompt, "conversation_id": "c"})
        assert answer.headers["x-kvbus-mode"] == "early"
    await all_quiet(http, [engine.url for engine in fleet.engines])
    for child in fleet.children():
        child.check()
    for log in fleet.log_dir.glob("*.log"):
        text = log.read_text()
        for word in ("Traceback", "handler_failed", "watch_handler_failed"):
            assert word not in text, (log, word)
