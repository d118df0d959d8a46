"""`kvbus up --secure` with real vLLM: every process has a key of its own, and nothing that it needs is denied."""

from pathlib import Path
from typing import Any

import pytest
from tests.vllm_world import World, prompt_of, tokens_of, world

from kvbus.bus import Bus, BusSettings
from kvbus.errors import BusError
from kvbus_schemas import AnyMessage, PushDone, ReuseAsked, ReuseOffered, subjects

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="module")]

TURNS = 3
TOKENS = 600
ANSWER_TOKENS = 8


async def test_engines_with_keys_hand_over_and_reuse_with_the_plain_tokens_and_nobody_is_denied(tmp_path: Path) -> None:
    heard: list[AnyMessage] = []
    async with world(tmp_path, model="small", secure=True, prefill_arguments=["--no-enable-prefix-caching"]) as there:
        observer = await observe(there, heard)
        prompt = prompt_of(TOKENS, 1)
        reuse = [await turn(there, prompt) for _ in range(TURNS)]
        await observer.close()
        with pytest.raises(BusError, match="authorization violation"):
            await Bus.connect(BusSettings(nats=there.fleet.nats_url, connect_timeout_s=2), name="x", incarnation="1")
        log_dir = there.fleet.log_dir
    assert reuse[0].startswith("miss")
    assert all(said.startswith("hit") for said in reuse[1:]), reuse
    speakers = {type(message): message.source for message in heard}
    assert speakers[ReuseOffered] == "decode-0"
    assert speakers[ReuseAsked] == "router-0"
    wrote = {message.source for message in heard if isinstance(message, PushDone)}
    assert wrote == {"prefill-0-r0", "decode-0-r0"}  # the hand-over, and what decode gave back
    for log in log_dir.glob("*.log"):
        said = log.read_text()
        assert "bus_denied" not in said, log
        assert "dead_letter" not in said, log


async def turn(there: World, prompt: list[int]) -> str:
    """One turn of the conversation, which grows by it; what the router says of its reuse."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "conversation_id": "c"}
    answer = await there.same_as_plain(body)
    assert answer["headers"]["x-kvbus-mode"] == "early"
    prompt += tokens_of(answer)[0] + prompt_of(40, len(prompt))
    return str(answer["headers"]["x-kvbus-reuse"])


async def observe(there: World, heard: list[AnyMessage]) -> Bus:
    """An ear with the observer's key."""
    directory = there.fleet.access.directory
    assert directory is not None
    settings = BusSettings(nats=there.fleet.nats_url, nkey_seed_file=str(directory / "observer.nk"))
    observer = await Bus.connect(settings, name="observer", incarnation="1")
    await observer.subscribe(subjects.everything(), heard.append)
    return observer
