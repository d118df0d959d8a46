"""Whatever dies or lies between two turns, on real vLLM: the turn is computed, with the right tokens, no error to the
client, and within a bounded time."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from tests.vllm.test_reuse import NO_CACHE
from tests.vllm_talk import NEW, Talk, talking, tokens_in
from tests.vllm_world import Json, prompt_of

from kvbus.conversations_client import ReuseClient
from kvbus.errors import BusError
from kvbus_schemas import BlocksUnavailable, ReuseOffered, ReuseReleased, TransferClosed

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.asyncio(loop_scope="module")]

SOON_S = 10.0
"""A turn of a few hundred tokens and a plain engine's answer to it, on a busy machine."""
FENCED_S = 40.0
"""An engine that was killed is fenced after its presence lease and the longest WRITE, 11 s; then all is computed."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talk(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Talk]:
    """One prefill that caches nothing, and two decodes."""
    async with talking(tmp_path_factory.mktemp("faults"), prefill_arguments=[NO_CACHE], decode=2) as found:
        yield found
        await found.forget_all()


async def _first_turn(talk: Talk, conversation: str, seed: int) -> tuple[Json, ReuseOffered]:
    """A turn that a decode keeps: the body of the next one, and the offer."""
    before = len(talk.offers())
    _, answer = await talk.ask({"prompt": prompt_of(400, seed=seed)}, conversation)
    await _until(lambda: len(talk.offers()) > before, SOON_S)
    return _next(answer, seed), talk.offers()[-1]


def _next(answer: Json, seed: int) -> Json:
    prompt, tokens = tokens_in(answer)
    return {"prompt": prompt + tokens + prompt_of(NEW, seed=seed + 1)}


async def _next_turn(
    talk: Talk, body: Json, conversation: str, within_s: float = SOON_S, mode: str = "early"
) -> tuple[str, Json]:
    since_s = time.monotonic()
    said, answer = await talk.ask(body, conversation, mode=mode)
    assert time.monotonic() - since_s < within_s
    return said, answer


async def _until(holds: Callable[[], object], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  (other processes' doing)
            await asyncio.sleep(0.02)


async def test_a_key_whose_blocks_are_gone_costs_no_wait(talk: Talk) -> None:
    """Decode has let go and the key is still there: decode says so at once, and nobody waits for a timeout."""
    body, offer = await _first_turn(talk, "stale", 100)
    assert talk.there.fleet.bus is not None
    released = ReuseReleased(
        conversation=offer.conversation, offer_id=offer.offer_id, transfer_id="0" * 32, reason="test"
    )
    await talk.there.fleet.bus.publish(released, offer.engine_id)
    await asyncio.sleep(0.5)
    said, _ = await _next_turn(talk, body, "stale")
    assert said == "miss reason=unavailable"
    told = [message for message in talk.there.heard if isinstance(message, BlocksUnavailable)]
    assert {message.reason for message in told} == {"unknown"}
    closed = [m for m in talk.there.heard if isinstance(m, TransferClosed) and m.transfer_id == told[0].transfer_id]
    assert [message.outcome for message in closed] == ["failed"]
    assert closed[0].waited_ms < 3000  # far below reuse_wait_s


async def test_routers_matcher_and_reuse_process_may_be_restarted_between_two_turns(talk: Talk) -> None:
    fleet = talk.there.fleet
    body, _ = await _first_turn(talk, "restarts", 110)
    for child in (*fleet.routers, *fleet.matchers, *fleet.reuses):
        child.kill()
        child.start_again()
    await _until_served(talk)
    said, answer = await _next_turn(talk, body, "restarts", 3 * SOON_S)
    assert said.startswith("hit tokens=")
    for child in fleet.reuses:
        child.kill()
    said, answer = await _next_turn(talk, _next(answer, 112), "restarts")
    assert said == "miss reason=unavailable"
    for child in fleet.reuses:
        child.start_again()
    await _until_served(talk)
    await _until_known(talk, talk.offers()[-1])  # it was made while no reuse process was there
    said, _ = await _next_turn(talk, _next(answer, 114), "restarts")
    assert said.startswith("hit tokens=")


async def _until_async(holds: Callable[[], Awaitable[object]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _until_served(talk: Talk) -> None:
    """A reuse process answers, and the router is on the bus and knows the secret."""
    fleet = talk.there.fleet
    await fleet._until_ready()
    client = ReuseClient(fleet.bus)

    async def answers() -> bool:
        return (await client.ask("0" * 32, 1.0, claim=False)).miss != "unavailable"

    async def asks() -> bool:
        answer = await talk.there.routed({"prompt": "x", "max_tokens": 1, "conversation_id": "warm"})
        return answer["headers"]["X-Kvbus-Reuse"] not in ("miss reason=disabled", "miss reason=unavailable")

    await _until_async(answers, 60.0)
    await _until_async(asks, 60.0)
    await client.close()


async def _engines_are_back(talk: Talk) -> bool:
    with contextlib.suppress(BusError):  # the bucket of cards was in memory, and is made again
        return {"prefill-0", "decode-0", "decode-1"} <= set(await talk.there.fleet.cards())
    return False


async def _until_known(talk: Talk, offer: ReuseOffered) -> None:
    """The offer can be had."""
    client = ReuseClient(talk.there.fleet.bus)

    async def held() -> bool:
        return (await client.ask(offer.conversation, 1.0, claim=False)).grant is not None

    await _until_async(held, 30.0)
    await client.close()


async def test_nats_may_be_down_between_two_turns(talk: Talk) -> None:
    fleet = talk.there.fleet
    assert fleet.nats is not None
    assert fleet.bus is not None
    body, offer = await _first_turn(talk, "no bus", 120)
    await asyncio.to_thread(fleet.nats.kill)
    await asyncio.sleep(0.5)
    said, _ = await _next_turn(talk, body, "no bus", mode="")  # decode computes it all
    assert said == "miss reason=unavailable"
    await asyncio.to_thread(fleet.nats.start)
    await _until_async(lambda: _engines_are_back(talk), 60.0)
    await _until_served(talk)
    await _until_known(talk, offer)
    said, _ = await _next_turn(talk, body, "no bus")
    assert said.startswith("hit tokens=")


async def test_decode_may_be_killed_in_the_middle_of_giving_back_and_its_keys_are_worth_nothing_afterwards(
    talk: Talk,
) -> None:
    fleet = talk.there.fleet
    body, offer = await _first_turn(talk, "killed", 130)
    idle = {}
    for number in range(4):  # some of them on the decode that is killed
        conversation = f"older incarnation {number}"
        idle[conversation] = await _first_turn(talk, conversation, 140 + 2 * number)
    holder = fleet.engine(offer.engine_id).child
    holder.send_all(signal.SIGSTOP)  # so that it is in the middle of it for as long as it lives
    before = len(talk.registered(reuse=True))
    turn = asyncio.create_task(_next_turn(talk, body, "killed", FENCED_S))
    await _until(lambda: len(talk.registered(reuse=True)) > before, SOON_S)
    assert talk.registered(reuse=True)[-1].producer_id == offer.engine_id
    holder.kill()
    said, _ = await turn
    assert said.startswith("miss reason=")
    await fleet.restart_engine(offer.engine_id)
    await fleet.wait_engines()
    assert any(held.engine_id == offer.engine_id for _, held in idle.values())
    for conversation, (then, held) in idle.items():
        said, _ = await _next_turn(talk, then, conversation)
        assert said.startswith("miss reason=engine_gone" if held.engine_id == offer.engine_id else "hit tokens="), held
