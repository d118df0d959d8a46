"""What is done after the client has been served."""

import asyncio
import time
from collections.abc import Iterable

from kvbus.router.afterwards import DELAY_S, Afterwards, Served
from kvbus.router.answer import Result
from kvbus.router.core import Dispatch, Facts
from kvbus.router.fleet import Engine
from kvbus.router.metrics import Metrics
from kvbus.router.policies import RouteChoice
from kvbus_schemas import Post, RequestServed


def _served(number: int) -> Served:
    decode = Engine(engine_id="decode-0", role="decode", http_url="http://127.0.0.1:1")
    choice = RouteChoice(mode="local", prefill_id="", decode_id="decode-0", reason="test", candidates=[])
    dispatch = Dispatch(
        Facts(request_id=str(number)),
        choice,
        transfer_id=f"{number:032x}",
        attempt=1,
        deadline_s=1.0,
        prefill=None,
        decode=decode,
    )
    return Served(
        request_id=str(number), body_bytes=1, dispatch=dispatch, result=Result(outcome="completed", status=200)
    )


async def test_every_request_gets_its_last_word_whenever_it_ends() -> None:
    """Requests that end while an earlier batch is being worked off are not forgotten."""
    said: list[str] = []

    async def publish(posts: Iterable[Post]) -> None:
        await asyncio.sleep(0)
        said.extend(post.message.request_id for post in posts if isinstance(post.message, RequestServed))

    afterwards = Afterwards(Metrics(), publish)
    for number in range(40):
        afterwards.add(_served(number))
        await asyncio.sleep(DELAY_S * (number % 3) / 2)
    await asyncio.sleep(DELAY_S * 4)
    assert said == [str(number) for number in range(40)]


async def test_a_request_that_ends_as_the_timer_goes_off_arms_it_again() -> None:
    said: list[str] = []

    async def publish(posts: Iterable[Post]) -> None:
        said.extend(post.message.request_id for post in posts if isinstance(post.message, RequestServed))

    afterwards = Afterwards(Metrics(), publish)
    afterwards.add(_served(1))
    asyncio.get_running_loop().call_later(DELAY_S, afterwards.add, _served(2))
    time.sleep(DELAY_S * 3)  # noqa: ASYNC251  (both are due in one turn of the loop: the timer, then the request)
    await asyncio.sleep(DELAY_S * 4)
    afterwards.add(_served(3))
    await asyncio.sleep(DELAY_S * 4)
    assert said == ["1", "2", "3"]
