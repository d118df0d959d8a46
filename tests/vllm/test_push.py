"""Push on real vLLM: whatever the order and the shape, decode's tokens are a plain engine's."""

import asyncio
from typing import Any

import pytest
from tests.vllm_world import Order, World, kinds, prompt_of

from kvbus_schemas import BlocksReady, BlocksRegistered, PushDone, PushOrdered

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("order", ["together", "prefill first", "decode first"])
@pytest.mark.parametrize("length", [40, 500, 1001])
async def test_every_arrival_order_ends_with_the_plain_tokens(pair: World, order: Order, length: int) -> None:
    transfer_id = await pair.hand_over(prompt_of(length, seed=length * 7 + len(order)), order)
    closed = await pair.closed(transfer_id)
    assert closed.outcome == "completed"


async def test_the_order_reaches_prefill_while_it_computes(pair: World) -> None:
    transfer_id = await pair.hand_over(prompt_of(1500, seed=11))
    await pair.closed(transfer_id)
    said = kinds(pair.about(transfer_id))
    assert said.index("PushOrdered") < said.index("BlocksReady")


async def test_a_finished_chunk_is_written_while_the_next_computes(pair: World) -> None:
    transfer_id = await pair.hand_over(prompt_of(1500, seed=12), "decode first")
    (done,) = await pair.until_heard(PushDone, transfer_id)
    assert isinstance(done, PushDone)
    assert done.writes > 1
    assert done.tail_bytes < done.bytes / 2
    assert sum(count for _, count in done.ranges) == 47


async def test_a_registration_that_arrives_halfway_is_served_with_what_is_ready(pair: World) -> None:
    transfer_id = await pair.hand_over(prompt_of(3000, seed=14), "decode halfway")
    said = kinds(pair.about(transfer_id))
    assert said.index("PushOrdered") < said.index("BlocksReady")
    (done,) = await pair.until_heard(PushDone, transfer_id)
    assert isinstance(done, PushDone)
    first_blocks, written = done.ranges[0]
    assert (first_blocks, done.writes > 1) == (0, True)
    assert written > 8  # several chunks of eight blocks were waiting


async def test_a_request_costs_at_most_twelve_messages(pair: World) -> None:
    transfer_id = await pair.hand_over(prompt_of(1500, seed=13))
    await pair.closed(transfer_id)
    await pair.until_heard(BlocksReady, transfer_id)
    assert len(pair.about(transfer_id)) <= 10, kinds(pair.about(transfer_id))  # and two from the router


async def test_eight_at_once_are_kept_apart(pair: World) -> None:
    prompts = [prompt_of(250 + 90 * number, seed=100 + number) for number in range(8)]
    transfers = await asyncio.gather(*(pair.hand_over(prompt) for prompt in prompts))
    for transfer_id in transfers:
        assert (await pair.closed(transfer_id)).outcome == "completed"


async def test_several_prompts_in_one_request_are_one_transfer_each(pair: World) -> None:
    prompts = [prompt_of(length, seed=length) for length in (310, 205, 260)]
    transfer_id = await pair.hand_over(prompts)
    registered = await pair.until_heard(BlocksRegistered, transfer_id)
    assert len({message.key for message in registered}) == 3


async def test_the_same_prompt_twice_in_one_request_is_right(pair: World) -> None:
    await pair.hand_over([prompt_of(300, seed=21), prompt_of(300, seed=21)])


async def test_several_answers_to_one_prompt_take_one_push(pair: World) -> None:
    transfer_id = await pair.hand_over(prompt_of(300, seed=22), n=3, temperature=0.7, top_k=1)
    assert len(await pair.until_heard(PushOrdered, transfer_id)) == 1


async def test_a_prefix_that_decode_has_is_not_sent_again(pair: World) -> None:
    prompt = prompt_of(400, seed=23)
    await pair.hand_over(prompt)
    transfer_id = await pair.hand_over(prompt + prompt_of(120, seed=24))
    (registered,) = await pair.until_heard(BlocksRegistered, transfer_id)
    assert isinstance(registered, BlocksRegistered)
    assert registered.first_block == 12  # 400 tokens are 12 full blocks of 32
    assert len(registered.block_ids[0]) == 5


async def test_a_prompt_that_decode_has_whole_is_not_sent_at_all(pair: World) -> None:
    prompt = prompt_of(400, seed=25)
    await pair.hand_over(prompt)
    transfer_id = await pair.hand_over(prompt)
    closed = await pair.closed(transfer_id)
    assert (closed.outcome, kinds(pair.about(transfer_id)).count("PushOrdered")) == ("completed", 0)


async def test_a_prefix_that_prefill_has_is_pushed_from_its_cache(pair: World) -> None:
    shared = prompt_of(320, seed=26)
    await pair.post(pair.fleet.engine("prefill-0").url + "/v1/completions", {"prompt": shared, "max_tokens": 1})
    transfer_id = await pair.hand_over(shared + prompt_of(100, seed=27))
    ready = await pair.until_heard(BlocksReady, transfer_id)
    assert isinstance(ready[0], BlocksReady)
    assert ready[0].cached_tokens == 320


@pytest.mark.parametrize("mode", ["early", "deferred", "local"])
async def test_the_router_gives_the_plain_tokens_in_every_mode(pair: World, mode: str) -> None:
    body = {"prompt": prompt_of(600, seed=len(mode)), "max_tokens": 12}
    answer = await pair.same_as_plain(body, {"X-Kvbus-Mode": mode})
    assert answer["headers"]["X-Kvbus-Mode"] == mode


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_chat_and_completions_streamed_or_not(pair: World, path: str, *, stream: bool) -> None:
    text = "What is a block, and who may write into it? " * 20
    request = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    body: dict[str, Any] = {**request, "max_tokens": 10}
    if not stream:
        await pair.same_as_plain(body, path=path)
        return
    got = await _streamed(pair, pair.fleet.base_url, path, body)
    assert got == await _streamed(pair, pair.fleet.plain_url, path, body)


async def _streamed(pair: World, base_url: str, path: str, body: dict[str, Any]) -> list[int]:
    """All token ids of a stream, by the official client."""
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0)
    extra = {"return_token_ids": True, "ignore_eos": True}
    endpoint = client.completions if path == "completions" else client.chat.completions
    stream = await endpoint.create(model=pair.model, temperature=0, stream=True, extra_body=extra, **body)
    tokens: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
    await client.close()
    return tokens
