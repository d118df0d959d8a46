"""Conversations over light engines: every turn finds what the last one left, tenants never meet, and nothing that they
sent, were answered or are called is in any byte on the bus, in NATS's files or in a log."""

import base64
import secrets
from collections.abc import AsyncIterator

import aiohttp
import nats
import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from tests.light_world import Answer, ask

from kvbus.light.language import tokens_of
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet

pytestmark = [pytest.mark.nats, pytest.mark.asyncio(loop_scope="module")]

CANARY = "canary-" + secrets.token_hex(4)
HOSTILE = {
    "wildcards": f"*.>.{CANARY}.*",
    "a subject of ours": f"{CANARY}.kvbus.v1.>",
    "control characters": f"\x00\r\nX-Evil: 1\r\n\x1b[2J{CANARY}",
    "ten kilobytes": CANARY * (10_240 // len(CANARY)),
    "a path": f"../../../{CANARY}",
    "other letters": f"\U0001f600\u202e{CANARY}",
}
PROMPT = f"The secret of {CANARY} is never told to anybody who listens. " * 4
PARTS_BYTES = 12
"""So many bytes of a secret in a row are a leak."""


class Capture:
    """All that NATS passes on: subjects, headers, payloads."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    async def take(self, msg: Msg) -> None:
        self.bytes += msg.subject.encode() + repr(msg.headers).encode() + msg.data


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    speed = ["--prefill-tokens-per-s", "20000", "--token-us", "500"]
    work_dir = tmp_path_factory.mktemp("capture")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBUS_ROUTER_REUSE_ASK_MS", "3000")
        async with start_fleet(FleetOptions(engine="sim", engine_arguments=speed, work_dir=work_dir)) as started:
            yield started


def _forms(secret: str) -> list[bytes]:
    """What a secret may look like in bytes: as it is, its tokens one by one, and encoded."""
    text, tokens = secret.encode(), tokens_of(secret)
    return [
        text,
        bytes(token % 256 for token in tokens),
        b"".join(token.to_bytes(4, "little") for token in tokens),
        ",".join(map(str, tokens)).encode(),
        ", ".join(map(str, tokens)).encode(),
        text.hex().encode(),
        base64.b64encode(text)[: len(text)],
        secret.encode("utf-16-le"),
    ]


def _leaks(where: bytes, secrets_: list[str]) -> list[bytes]:
    parts = [form[at : at + PARTS_BYTES] for one in secrets_ for form in _forms(one) for at in (0, 2 * PARTS_BYTES)]
    return [part for part in parts if len(part) == PARTS_BYTES and part in where]


async def test_two_tenants_with_hostile_ids_never_meet_and_nothing_of_theirs_is_on_the_bus(fleet: Fleet) -> None:
    capture = Capture()
    client = await nats.connect(fleet.nats_url)
    await client.subscribe(">", cb=capture.take)
    await client.flush()
    told = [PROMPT, CANARY, "tenant-one-key", "tenant-two-key"]
    answer = Answer([], [], {})
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        for conversation in HOSTILE.values():
            prompt = PROMPT + secrets.token_hex(8)
            for tenant in ("one", "two"):
                bearer = f"Bearer tenant-{tenant}-key"
                body = {"prompt": prompt, "conversation_id": conversation}
                answer = await ask(http, fleet.base_url, body, authorization=bearer)
                assert answer.headers["x-kvbus-reuse"] == "miss reason=new"
                told += [conversation, answer.texts[0]]
            for tenant in ("one", "two"):
                bearer = f"Bearer tenant-{tenant}-key"
                body = {"prompt": prompt + answer.texts[0] + " and more", "conversation_id": conversation}
                answer = await ask(http, fleet.base_url, body, authorization=bearer)
                assert answer.headers["x-kvbus-reuse"] != "miss reason=new"  # their own conversation is known
                told.append(answer.texts[0])
    await client.flush()
    await client.close()
    assert b"ReuseOffered" in capture.bytes
    assert b"RequestServed" in capture.bytes
    assert _leaks(bytes(capture.bytes), told) == []
    for path in fleet.options.work_dir.rglob("*"):
        if path.is_file():
            assert _leaks(path.read_bytes(), told) == [], path


async def test_a_leak_would_be_seen() -> None:
    for form in _forms(PROMPT):
        assert _leaks(b"before" + form + b"after", [PROMPT])


async def test_a_turn_that_follows_at_once_always_finds_what_the_last_one_left(fleet: Fleet) -> None:
    prompt, said = tokens_of(secrets.token_hex(100)), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        for turn in range(21):
            body = {"prompt": prompt, "conversation_id": "at once", "max_tokens": 4, "stream": turn % 2 == 0}
            answer = await ask(http, fleet.base_url, body, x_kvbus_mode="early")
            said.append(answer.headers["x-kvbus-reuse"])
            prompt = prompt + answer.tokens[0] + tokens_of(secrets.token_hex(40))
    assert said[0] == "miss reason=new"
    assert {word.replace("miss reason=not_needed", "hit").split()[0] for word in said[1:]} == {"hit"}, said


async def test_what_decode_computes_alone_is_kept_for_the_next_turn(fleet: Fleet) -> None:
    prompt = tokens_of(secrets.token_hex(100))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        for _ in range(2):
            body = {"prompt": prompt, "conversation_id": "alone"}
            answer = await ask(http, fleet.base_url, body, x_kvbus_mode="local")
            assert answer.headers["x-kvbus-reuse"] == "miss reason=disabled"
            prompt = prompt + answer.tokens[0]
        answer = await ask(http, fleet.base_url, {"prompt": prompt + [7] * 90, "conversation_id": "alone"})
    assert answer.headers["x-kvbus-reuse"] == f"hit tokens={len(prompt) - 1}"
