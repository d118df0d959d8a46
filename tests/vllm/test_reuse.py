"""Conversations keep their KV on real vLLM: what is computed again is only what is new, and every token is right."""

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.vllm_world import World, prompt_of, tokens_of, world

from kvbus_schemas import (
    BlocksRegistered,
    BlocksUnavailable,
    ReuseOffered,
    ReuseReleased,
    ReuseWithdrawn,
    TransferClosed,
)

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]

ANSWER = 16
NEW = 60


async def _computed(there: World, engine_id: str) -> float:
    """Prompt tokens that an engine has computed itself, from vLLM's own counter."""
    url = there.fleet.engine(engine_id).url
    async with there.http.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    counted = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total")]
    return sum(float(line.split()[-1]) for line in counted if "local_compute" in line)


async def _talk(there: World, turns: int, history: list[int]) -> list[str]:
    """A streamed conversation through the official client; every answer must be a plain engine's. Returns what each
    reply said of reuse."""
    said, conversation = [], secrets.token_hex(8)
    client = openai.AsyncOpenAI(base_url=there.fleet.base_url + "/v1", api_key="none", max_retries=0)
    extra = {"return_token_ids": True, "ignore_eos": True, "conversation_id": conversation}
    for turn in range(turns):
        reply = await client.completions.with_raw_response.create(
            model=there.model, prompt=history, max_tokens=ANSWER, temperature=0, stream=True, extra_body=extra
        )
        tokens: list[int] = []
        async for chunk in reply.parse():
            for choice in chunk.choices:
                tokens += (choice.model_extra or {}).get("token_ids") or []
        assert [tokens] == tokens_of(await there.plain({"prompt": history, "max_tokens": ANSWER}))
        said.append(reply.headers["X-Kvbus-Reuse"])
        history = history + tokens + prompt_of(NEW, seed=1000 + turn)
        await asyncio.sleep(0.15)  # the offer reaches the store
    await client.close()
    return said


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine_arguments": ["--no-enable-prefix-caching"]},
        {"prefill_arguments": ["--no-enable-prefix-caching"]},
        {"decode_arguments": ["--no-enable-prefix-caching"], "prefill": 2, "decode": 2},
    ],
    ids=["no prefix cache", "no prefix cache on prefill", "two of each, no prefix cache on decode"],
)
async def test_ten_turns_compute_only_what_is_new(tmp_path: Path, arguments: dict[str, Any]) -> None:
    async with world(tmp_path, model="tiny", **arguments) as there:
        prefills = [engine.engine_id for engine in there.fleet.engines if engine.role == "prefill"]
        before = sum([await _computed(there, engine_id) for engine_id in prefills])
        said = await _talk(there, turns=10, history=prompt_of(400, seed=1))
        computed = sum([await _computed(there, engine_id) for engine_id in prefills]) - before
        assert said[0].startswith("miss reason=new")
        reused = [int(word.split("tokens=")[1]) for word in said[1:] if word.startswith("hit")]
        taken = [m for m in there.heard if isinstance(m, BlocksRegistered) and m.reuse]
        closed = [m for m in there.heard if isinstance(m, TransferClosed) and m.key in {t.key for t in taken}]
        assert [message.outcome for message in closed] == ["completed"] * len(taken)
        if len(prefills) == 1:
            assert len(reused) == 9, said
            assert computed <= 400 + 9 * (NEW + 1 + 32)  # what is new, and at most one block again
        await _forget_all(there)
        await there.settled()


async def _forget_all(there: World) -> None:
    """Let decode go of what it still keeps, so that the blocks can be counted."""
    assert there.fleet.bus is not None
    for offer in await _offers(there):
        released = ReuseReleased(
            conversation=offer.conversation, offer_id=offer.offer_id, transfer_id="0" * 32, reason="test"
        )
        await there.fleet.bus.publish(released, offer.engine_id)


async def _offers(there: World) -> list[ReuseOffered]:
    assert there.fleet.bus is not None
    offers: list[ReuseOffered] = []

    async def hear(message: object) -> None:
        if isinstance(message, ReuseOffered):
            offers.append(message)

    await there.fleet.bus.catch_up("kvbus.v1.reuse.reuse_offered.>", hear)
    return offers


async def test_history_that_changed_is_reused_up_to_the_change(tmp_path: Path) -> None:
    async with world(tmp_path, model="tiny", engine_arguments=["--no-enable-prefix-caching"]) as there:
        history = prompt_of(700, seed=2)
        changes: list[tuple[str, Callable[[list[int]], list[int]], int]] = [
            ("edited", lambda tokens: [*tokens[:214], 7, *tokens[215:]], 192),
            ("shortened at the front", lambda tokens: tokens[100:], 0),
            ("truncated at the end", lambda tokens: tokens[:500], 480),
            ("a whole other prompt", lambda _: prompt_of(600, seed=3), 0),
        ]
        for name, change, expected in changes:
            conversation = f"conversation {name}"
            first = await there.routed({"prompt": history, "max_tokens": ANSWER, "conversation_id": conversation})
            await asyncio.sleep(0.2)
            changed = change(history + tokens_of(first)[0])
            body = {"prompt": changed, "max_tokens": ANSWER}
            answer = await there.routed({**body, "conversation_id": conversation})
            assert tokens_of(answer) == tokens_of(await there.plain(body)), name
            said = answer["headers"]["X-Kvbus-Reuse"]
            if expected:
                assert said == f"hit tokens={expected}", name
            else:
                assert "tokens=" not in said or said == "hit tokens=0", (name, said)

        # Two turns of one conversation at once: one claims, the other computes.
        first = await there.routed({"prompt": history, "max_tokens": ANSWER, "conversation_id": "twice"})
        await asyncio.sleep(0.2)
        body = {"prompt": history + tokens_of(first)[0] + prompt_of(NEW, seed=4), "max_tokens": ANSWER}
        answers = await asyncio.gather(*(there.routed({**body, "conversation_id": "twice"}) for _ in range(2)))
        expected_tokens = tokens_of(await there.plain(body))
        assert [tokens_of(answer) for answer in answers] == [expected_tokens] * 2
        said = sorted(answer["headers"]["X-Kvbus-Reuse"].split()[0] for answer in answers)
        assert said == ["hit", "miss"]

        # Decode is killed while it holds a conversation: the next turn is computed, with no error to the client.
        there.fleet.engine("decode-0").child.kill()
        await there.fleet.restart_engine("decode-0")
        await there.fleet.wait_engines()
        await asyncio.sleep(1.0)
        answer = await there.routed({**body, "conversation_id": "twice"})
        assert tokens_of(answer) == expected_tokens
        assert answer["headers"]["X-Kvbus-Reuse"].startswith("miss")
        await _forget_all(there)
        await there.settled()


async def test_decode_says_at_once_that_an_offer_is_gone(tmp_path: Path) -> None:
    """An offer expires while its claim is under way: prefill hears it at once and computes everything."""
    settings = {"reuse_ttl_s": "2"}
    async with world(tmp_path, model="tiny", engine_settings=settings) as there:
        history = prompt_of(400, seed=5)
        first = await there.routed({"prompt": history, "max_tokens": ANSWER, "conversation_id": "short"})
        await there.settled(within_s=6.0)  # the lifetime ends by itself on an engine that has nothing to do
        body = {"prompt": history + tokens_of(first)[0] + prompt_of(NEW, seed=6), "max_tokens": ANSWER}
        answer = await there.routed({**body, "conversation_id": "short"})
        assert tokens_of(answer) == tokens_of(await there.plain(body))
        assert answer["headers"]["X-Kvbus-Reuse"].startswith("miss")
        assert not [message for message in there.heard if isinstance(message, BlocksUnavailable)]
        await there.settled(within_s=6.0)


async def test_the_oldest_conversations_yield_when_memory_is_short(tmp_path: Path) -> None:
    """Decode keeps what fits and lets the oldest go, says so, and never refuses a request for what it keeps."""
    few = ["--num-gpu-blocks-override", "96", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    async with world(tmp_path, model="tiny", engine_arguments=few) as there:
        assert there.fleet.bus is not None
        withdrawn: list[ReuseWithdrawn] = []

        async def hear(message: object) -> None:
            if isinstance(message, ReuseWithdrawn):
                withdrawn.append(message)

        await there.fleet.bus.subscribe("kvbus.v1.reuse.reuse_withdrawn.>", hear)
        bodies = [{"prompt": prompt_of(400, seed=200 + number), "max_tokens": ANSWER} for number in range(6)]
        for number, body in enumerate(bodies):
            answer = await there.routed({**body, "conversation_id": f"conversation {number}"})
            assert tokens_of(answer) == tokens_of(await there.plain(body))
        assert [message.reason for message in withdrawn] == ["evicted"] * len(withdrawn)
        assert len(withdrawn) >= 3  # 13 blocks each, and 48 may be kept
        many = [{"prompt": prompt_of(500, seed=300 + number), "max_tokens": ANSWER} for number in range(6)]
        answers = await asyncio.gather(*(there.routed(body) for body in many))
        for body, answer in zip(many, answers, strict=True):
            assert tokens_of(answer) == tokens_of(await there.plain(body))
        await _forget_all(there)
        await there.settled()
