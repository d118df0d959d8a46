"""All of kvbus over light engines, as `kvbus up --engine sim` starts it, answers as one engine alone does."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from tests.light_world import Answer, all_quiet, ask

from kvbus.light.language import tokens_of
from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus_schemas import AnyMessage, ReuseGrant, ReuseOffered, Ticket, subjects

LONG = "Everything that is decided inside the engines becomes a subscriber that can be watched. " * 12
pytestmark = pytest.mark.asyncio(loop_scope="module")
SPEED = ["--prefill-tokens-per-s", "20000", "--token-us", "500", "--max-num-batched-tokens", "256"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    work_dir: Path = tmp_path_factory.mktemp("light")
    options = FleetOptions(
        prefill=2,
        decode=2,
        engine="sim",
        engine_arguments=SPEED,
        router_arguments=["--no-reuse"],  # what is kept for conversations is not back
        plain=True,
        work_dir=work_dir,
    )
    since_s = time.monotonic()
    async with start_fleet(options) as started:
        assert time.monotonic() - since_s < 60, "light engines are ready in seconds"
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def http(fleet: Fleet) -> AsyncIterator[aiohttp.ClientSession]:
    """A client; after the test nothing runs, waits or holds a block anywhere."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session
        await all_quiet(session, urls_of(fleet))


def urls_of(fleet: Fleet) -> list[str]:
    return [engine.url for engine in fleet.engines]


async def both(http: aiohttp.ClientSession, fleet: Fleet, body: dict[str, Any], **headers: str) -> Answer:
    """Through the router and from the engine alone: the same tokens."""
    routed, plain = await asyncio.gather(ask(http, fleet.base_url, body, **headers), ask(http, fleet.plain_url, body))
    assert (routed.tokens, routed.texts) == (plain.tokens, plain.texts)
    assert all(routed.tokens)
    return routed


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": LONG[:500]}]}
BODIES: dict[str, dict[str, Any]] = {
    "one token": {"prompt": "x"},
    "less than a block": {"prompt": "a short one"},
    "exactly one block": {"prompt": "b" * 32},
    "one more than a block": {"prompt": "c" * 33},
    "several chunks": {"prompt": LONG},
    "streamed": {"prompt": LONG[:300], "stream": True},
    "chat": CHAT,
    "chat, streamed": CHAT | {"stream": True},
    "three answers": {"prompt": LONG[:400], "n": 3},
    "several prompts": {"prompt": [LONG[:100], LONG[:200], "short"], "n": 2},
    "token ids": {"prompt": [5, 6, 7] * 30},
    "that ends by itself": {"prompt": LONG[:77], "ignore_eos": False, "max_tokens": 400},
}


@pytest.mark.nats
@pytest.mark.parametrize("name", BODIES)
async def test_a_routed_answer_is_that_of_one_engine_alone(
    fleet: Fleet, http: aiohttp.ClientSession, name: str
) -> None:
    routed = await both(http, fleet, BODIES[name])
    assert routed.headers["x-kvbus-transfer"]


@pytest.mark.nats
@pytest.mark.parametrize("mode", ["early", "deferred", "local"])
async def test_every_mode_answers_alike(fleet: Fleet, http: aiohttp.ClientSession, mode: str) -> None:
    routed = await both(http, fleet, {"prompt": f"{mode} {LONG}"}, x_kvbus_mode=mode)
    assert routed.headers["x-kvbus-mode"] == mode


@pytest.mark.nats
async def test_many_at_a_time_are_never_mixed_up(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    bodies = [{"prompt": f"{number} {LONG[number * 7 :]}", "stream": number % 2 == 0} for number in range(40)]
    await asyncio.gather(*(both(http, fleet, body) for body in bodies))


@pytest.mark.nats
async def test_a_prompt_that_decode_has_already_holds_no_blocks_in_a_busy_prefill(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": f"{number} {LONG * 3}", "max_tokens": 2} for number in range(6)]
    bodies += [{"prompt": ["short", f"shorter {number}", "s"], "max_tokens": 2} for number in range(30)]
    await asyncio.gather(*(both(http, fleet, body) for body in bodies))


@pytest.mark.nats
async def test_decode_computes_nothing_that_was_pushed(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": f"all pushed {LONG}", "max_tokens": 2}
    async with http.post(fleet.base_url + "/v1/completions", json=body) as response:
        usage = (await response.json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.mark.nats
@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.1])
async def test_a_client_that_leaves_costs_no_blocks(fleet: Fleet, http: aiohttp.ClientSession, wait_s: float) -> None:
    body = {"prompt": f"{wait_s} {LONG * 4}", "max_tokens": 3000, "stream": True}
    asked = [body, body | {"n": 2}, body | {"prompt": [f"{wait_s} {number} {LONG}" for number in range(3)]}]
    leaving = [asyncio.create_task(ask(http, fleet.base_url, one)) for one in asked]
    await asyncio.sleep(wait_s)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    await all_quiet(http, urls_of(fleet))


@pytest.mark.nats
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"transfer_id": "x"}, "transfer_id must be 32"),
        ({"producer_id": "prefill-9"}, "is for engine 'prefill-9', this is 'prefill-0'"),
        ({"producer_incarnation": "old"}, "the engine was restarted"),
        ({"deadline_s": 0.0}, "has expired"),
        ({"version": 2}, "send version 1"),
    ],
)
async def test_a_bad_ticket_is_a_400_that_says_why(
    fleet: Fleet, http: aiohttp.ClientSession, change: dict[str, Any], says: str
) -> None:
    ticket = Ticket(transfer_id="a" * 32, role="produce", mode="early", producer_id="prefill-0")
    params = msgspec.structs.replace(ticket, **change).to_params()
    body = {"prompt": "x", "kv_transfer_params": params}
    async with http.post(fleet.engine("prefill-0").url + "/v1/completions", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"]) == (400, "invalid_ticket")
    assert says in error["message"]


async def hand_over(
    http: aiohttp.ClientSession, fleet: Fleet, ticket: Ticket, prompt: list[int], grant: ReuseGrant | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Send both legs, as a router would: what prefill says of its claim, and decode's tokens."""
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    legs = {
        ticket.producer_id: body
        | {"max_tokens": 1}
        | {"kv_transfer_params": msgspec.structs.replace(ticket, reuse=grant, conversation="").to_params()},
        ticket.consumer_id: body | {"kv_transfer_params": msgspec.structs.replace(ticket, role="consume").to_params()},
    }

    async def send(engine_id: str, leg: dict[str, Any]) -> dict[str, Any]:
        async with http.post(fleet.engine(engine_id).url + "/v1/completions", json=leg) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    prefilled, decoded = await asyncio.gather(*(send(*leg) for leg in legs.items()))
    return (prefilled["kv_transfer_params"] or {}).get("kvbus", {}), decoded["choices"][0]["token_ids"]


@pytest.mark.nats
async def test_the_next_turn_takes_the_conversations_kv_back_from_decode(
    fleet: Fleet, http: aiohttp.ClientSession
) -> None:
    offers: asyncio.Queue[AnyMessage] = asyncio.Queue()
    assert fleet.bus is not None
    await fleet.bus.subscribe(subjects.of_kind(ReuseOffered), offers.put)
    ticket = Ticket(transfer_id="1" * 32, role="produce", mode="early", producer_id="prefill-0", consumer_id="decode-0")
    prompt = tokens_of(f"a conversation: {LONG}")
    _, answer = await hand_over(http, fleet, msgspec.structs.replace(ticket, conversation="c" * 32), prompt)
    offer = await asyncio.wait_for(offers.get(), 5)
    assert isinstance(offer, ReuseOffered)
    assert offer.token_count == len(prompt) + len(answer) - 1
    grant = ReuseGrant(
        transfer_id="3" * 32,
        offer_id=offer.offer_id,
        holder_id="decode-0",
        holder_incarnation=offer.incarnation,
        conversation=offer.conversation,
        token_count=offer.token_count,
        block_size=offer.block_size,
        chain=offer.chain,
    )
    ticket = msgspec.structs.replace(ticket, transfer_id="2" * 32, producer_id="prefill-1", consumer_id="decode-1")
    prompt += answer + tokens_of(" and the next turn")
    said, answer = await hand_over(http, fleet, ticket, prompt, grant)
    assert said == {"reused_tokens": offer.token_count, "reuse": "hit"}
    assert (await ask(http, fleet.plain_url, {"prompt": prompt, "max_tokens": 40})).tokens == [answer]


@pytest.mark.nats
@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"prompt": ""}', b'{"prompt": [-1]}', b'{"prompt": "x", "max_tokens": 9999}', b'{"prompt": 3}'],
)
async def test_a_body_that_cannot_be_served_is_a_400(fleet: Fleet, http: aiohttp.ClientSession, body: bytes) -> None:
    async with http.post(fleet.plain_url + "/v1/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


@pytest.mark.nats
async def test_a_matcher_that_is_killed_and_replaced_costs_no_answer(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    fleet.matchers.pop().kill()
    asked = [asyncio.create_task(both(http, fleet, {"prompt": f"unmatched {n} {LONG}"})) for n in range(3)]
    await asyncio.sleep(0.2)
    fleet.start_matcher(1)
    await asyncio.gather(*asked)


@pytest.mark.nats
async def test_a_prefill_that_is_killed_costs_no_answer(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    body = {"prompt": LONG * 7}
    asked = [asyncio.create_task(both(http, fleet, body | {"prompt": f"{n} {body['prompt']}"})) for n in range(4)]
    await asyncio.sleep(0.3)
    fleet.engine("prefill-0").child.kill()
    await asyncio.gather(*asked)
    await fleet.restart_engine("prefill-0")
    await fleet.wait_engines()


@pytest.mark.nats
async def test_an_engine_that_is_stopped_finishes_what_it_has(fleet: Fleet, http: aiohttp.ClientSession) -> None:
    asked = asyncio.create_task(both(http, fleet, {"prompt": "to the end", "max_tokens": 1500}))
    await asyncio.sleep(0.3)
    children = [fleet.engine(engine_id).child for engine_id in ("decode-0", "decode-1")]
    for child in children:
        child.send(signal.SIGTERM)
    await asked
    deadline_s = time.monotonic() + 10
    while any(child.exit_code is None for child in children) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert [child.exit_code for child in children] == [0, 0]
    assert {"decode-0", "decode-1"}.isdisjoint(await fleet.cards())
    for engine_id in ("decode-0", "decode-1"):
        await fleet.restart_engine(engine_id)
    await fleet.wait_engines()
