"""Other fleets: tensor parallel decode, two of each, little memory, engines that do not fit together."""

import asyncio
from pathlib import Path

import pytest
from tests.vllm_world import prompt_of, tokens_of, world

from kvbus_schemas import BlocksRegistered, BlocksUnavailable, PushDone

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]


async def test_prefill_with_one_rank_pushes_to_decode_with_two(tmp_path: Path) -> None:
    async with world(tmp_path, model="tiny", decode_arguments=["--tensor-parallel-size", "2"]) as there:
        decode_url = there.fleet.engine("decode-0").url
        for length in (100, 500, 900):
            produce, consume = await there.tickets()
            prompt = prompt_of(length, seed=length)
            (_, _), (status, answer) = await asyncio.gather(
                there.prefill_leg(produce, prompt), there.decode_leg(consume, prompt)
            )
            assert status == 200
            assert (await there.closed(produce.transfer_id)).outcome == "completed"
            # Two ranks may round another way than one: compare with the same engine computing alone.
            body = {"model": there.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            _, alone, _ = await there.post(decode_url + "/v1/completions", {**body, "prompt": prompt, "max_tokens": 8})
            assert tokens_of(answer) == tokens_of(alone)
        await there.settled()


async def test_two_prefills_and_two_decodes(tmp_path: Path) -> None:
    async with world(tmp_path, model="tiny", prefill=2, decode=2, router_arguments=["--no-reuse"]) as there:
        bodies = [{"prompt": prompt_of(300 + 40 * number, seed=number), "max_tokens": 8} for number in range(12)]
        await asyncio.gather(*(there.same_as_plain(body) for body in bodies))
        registered = [message for message in there.heard if isinstance(message, BlocksRegistered)]
        pairs = {(message.producer_id, message.consumer_id) for message in registered}
        assert {prefill for prefill, _ in pairs} == {"prefill-0", "prefill-1"}
        assert {decode for _, decode in pairs} == {"decode-0", "decode-1"}
        await there.settled()


async def test_preemption_on_either_side(tmp_path: Path) -> None:
    """Fewer blocks than the requests need together, on both engines: vLLM preempts, the tokens stay right."""
    few = ["--num-gpu-blocks-override", "64", "--max-model-len", "1536", "--max-num-batched-tokens", "128"]
    async with world(tmp_path, model="tiny", engine_arguments=few, router_arguments=["--no-reuse"]) as there:
        bodies = [{"prompt": prompt_of(400, seed=number), "max_tokens": 160} for number in range(8)]
        await asyncio.gather(*(there.same_as_plain(body) for body in bodies))
        preempted = [
            await there.metric(engine.url, "vllm:num_preemptions_total")
            for engine in there.fleet.engines
            if engine.role != "plain"
        ]
        assert any(preempted), "nothing was preempted: give the engines fewer blocks"
        await there.settled()


async def test_unequal_block_sizes_are_refused_with_both_values_before_anything_is_written(tmp_path: Path) -> None:
    async with world(tmp_path, model="tiny", decode_arguments=["--block-size", "64"]) as there:
        produce, consume = await there.tickets()
        prompt = prompt_of(300, seed=1)
        (_, _), (status, answer) = await asyncio.gather(
            there.prefill_leg(produce, prompt), there.decode_leg(consume, prompt)
        )
        assert status == 200
        assert tokens_of(answer) == tokens_of(await there.plain({"prompt": prompt, "max_tokens": 8}))
        (refused, *_) = await there.until_heard(BlocksUnavailable, produce.transfer_id)
        assert isinstance(refused, BlocksUnavailable)
        assert refused.reason == "refused"
        assert "64" in refused.detail
        assert "32" in refused.detail
        assert not [message for message in there.about(produce.transfer_id) if isinstance(message, PushDone)]
        await there.settled()
