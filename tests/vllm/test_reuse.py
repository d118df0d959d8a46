"""Conversations keep their KV on real vLLM, whatever is cached where: what is computed again is only what is new, and
every token is right."""

import asyncio
import math
from pathlib import Path

import pytest
from tests.vllm_talk import ANSWER, BLOCK, NEW, Talk, talking
from tests.vllm_world import prompt_of, tokens_of

from kvbus_schemas import BlocksUnavailable, ReuseWithdrawn

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]

TURNS = 10
FIRST = 400
NO_CACHE = "--no-enable-prefix-caching"
FEW_BLOCKS = ["--num-gpu-blocks-override", "96", "--max-model-len", "2048"]


async def ten_turns(talk: Talk, *, prefill_caches: bool, decode_caches: bool) -> None:
    """Ten streamed turns, each sent as soon as the last one has ended."""
    before = {role: await talk.by_source(role) for role in ("prefill", "decode")}
    said = await talk.turns(TURNS, prompt=FIRST)
    after = {role: await talk.by_source(role) for role in ("prefill", "decode")}
    sources = {role: {s: after[role][s] - before[role].get(s, 0) for s in after[role]} for role in after}
    new = NEW + 1 + (ANSWER if prefill_caches else 0)  # the answer was computed by decode
    assert sources["prefill"]["local_compute"] <= FIRST + (TURNS - 1) * (new + BLOCK), sources
    assert sources["decode"]["local_compute"] <= TURNS, sources
    assert said[0] == "miss reason=new"
    taken = talk.registered(reuse=True)
    if prefill_caches:  # there is less to take back than is worth a transfer
        assert set(said[1:]) == {"miss reason=not_needed"}, said
        assert sources["prefill"]["local_cache_hit"] >= (TURNS - 1) * (FIRST - BLOCK)
        assert taken == []
    else:
        held = [FIRST + turn * (NEW + ANSWER) + ANSWER - 1 for turn in range(TURNS - 1)]
        assert said[1:] == [f"hit tokens={tokens}" for tokens in held]
        assert sources["prefill"]["external_kv_transfer"] == sum(held), sources
        assert [talk.outcome(registration.transfer_id) for registration in taken] == ["completed"] * (TURNS - 1)
    wanted = [len(registration.block_ids[0]) for registration in talk.registered(reuse=False)]
    lacking = [math.ceil((FIRST + turn * (NEW + ANSWER)) / BLOCK) for turn in range(TURNS)]
    if decode_caches:
        lacking = [lacking[0]] + [math.ceil((NEW + ANSWER) / BLOCK) + 1] * (TURNS - 1)
    assert len(wanted) == TURNS
    assert all(blocks <= most for blocks, most in zip(wanted, lacking, strict=True)), wanted
    await talk.forget_all()


async def test_ten_turns_move_over_two_prefills_and_two_decodes_that_cache_nothing(tmp_path: Path) -> None:
    moving = ["--policy", "round_robin"]
    async with talking(tmp_path, engine_arguments=[NO_CACHE], prefill=2, decode=2, router_arguments=moving) as talk:
        await ten_turns(talk, prefill_caches=False, decode_caches=False)
        pushes = talk.registered(reuse=False)
        assert {push.producer_id for push in pushes} == {"prefill-0", "prefill-1"}
        assert {push.consumer_id for push in pushes} == {"decode-0", "decode-1"}
        returns = {(back.producer_id, back.consumer_id) for back in talk.registered(reuse=True)}
        assert {holder for holder, _ in returns} == {"decode-0", "decode-1"}


async def test_ten_turns_where_both_cache_and_an_end_after_the_lifetime(tmp_path: Path) -> None:
    async with talking(tmp_path, engine_settings={"reuse_ttl_s": "3"}) as talk:
        await ten_turns(talk, prefill_caches=True, decode_caches=True)
        first = await talk.there.routed(
            {"prompt": prompt_of(400, seed=5), "max_tokens": ANSWER, "conversation_id": "x"}
        )
        await talk.there.settled(within_s=9.0)  # the lifetime ends by itself on an engine that has nothing to do
        prompt = prompt_of(400, seed=5) + tokens_of(first)[0] + prompt_of(NEW, seed=6)
        said, _ = await talk.ask({"prompt": prompt}, "x")
        assert said == "miss reason=expired"
        assert not [message for message in talk.there.heard if isinstance(message, BlocksUnavailable)]
        await talk.forget_all()


async def test_ten_turns_where_only_prefill_caches_and_the_oldest_yield_when_memory_is_short(tmp_path: Path) -> None:
    """Decode keeps what fits and lets the oldest go, says so, and never refuses a request for what it keeps."""
    async with talking(tmp_path, decode_arguments=[NO_CACHE], engine_arguments=FEW_BLOCKS) as talk:
        await ten_turns(talk, prefill_caches=True, decode_caches=False)
        before = len(_withdrawn(talk))
        for number in range(6):
            await talk.ask({"prompt": prompt_of(400, seed=200 + number)}, f"conversation {number}")
        async with asyncio.timeout(5):
            while len(_withdrawn(talk)) < before + 3:  # noqa: ASYNC110  13 blocks each, and 48 may be kept
                await asyncio.sleep(0.02)
        assert {message.reason for message in _withdrawn(talk)[before:]} == {"evicted"}
        said, _ = await talk.ask({"prompt": prompt_of(400, seed=200) + prompt_of(NEW, seed=9)}, "conversation 0")
        assert said == "miss reason=withdrawn"
        many = [{"prompt": prompt_of(500, seed=300 + number), "max_tokens": ANSWER} for number in range(6)]
        answers = await asyncio.gather(*(talk.there.routed(body) for body in many))
        for body, answer in zip(many, answers, strict=True):
            assert tokens_of(answer) == tokens_of(await talk.there.plain(body))
        await talk.forget_all()


def _withdrawn(talk: Talk) -> list[ReuseWithdrawn]:
    return [message for message in talk.heard if isinstance(message, ReuseWithdrawn)]
