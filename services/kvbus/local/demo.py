"""`kvbus demo`: two real engines hand a request over, and every token is compared with a plain engine's."""

import asyncio
import time
from typing import Any

import msgspec
from openai import AsyncOpenAI

from kvbus.errors import CommandFailed
from kvbus.local.fleet import Fleet, Say
from kvbus.trace.core import Story, named, stories_of
from kvbus.trace.reader import lines_of_requests
from kvbus_schemas import RequestServed

MAX_TOKENS = 32
TRACE_WAIT_S = 5.0
QUESTIONS = (
    "Why does a prefill engine not generate the answer itself? Explain it to somebody who has never seen a KV cache.",
    "And what travels on the message bus, if the tensors do not?",
)
SYSTEM = "You are a patient engineer who explains distributed systems. " * 12


class Answer(msgspec.Struct, frozen=True):
    """What came back for one request."""

    text: str
    tokens: list[int]
    ttft_ms: float
    transfer_id: str = ""


async def run_demo(fleet: Fleet, say: Say) -> list[Story]:
    """Send requests, compare, and return the stories of their transfers. Raises CommandFailed on a difference."""
    routed, plain = _client(fleet.base_url), _client(fleet.plain_url)
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    transfers: list[str] = []
    try:
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            text = ""
            for stream in (True, False):
                answer = await _ask(routed, fleet.options.model, messages, stream=stream)
                expected = await _ask(plain, fleet.options.model, messages, stream=stream)
                _compare(answer, expected, f"turn {number}, {'streamed' if stream else 'whole'}", say)
                transfers.append(answer.transfer_id)
                text = answer.text
            messages.append({"role": "assistant", "content": text})
    finally:
        await routed.close()
        await plain.close()
    return await _stories(fleet, transfers)


def _client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url + "/v1", api_key="demo", max_retries=0, timeout=120)


def _compare(answer: Answer, expected: Answer, what: str, say: Say) -> None:
    if answer.tokens != expected.tokens or answer.text != expected.text:
        raise CommandFailed(f"{what}: the tokens differ from a plain engine's: {answer.tokens} and {expected.tokens}")
    say(
        f"{what}: {len(answer.tokens)} tokens, the same as a plain engine's; "
        f"first after {answer.ttft_ms:.0f} ms (plain: {expected.ttft_ms:.0f} ms)"
    )


async def _ask(client: AsyncOpenAI, model: str, messages: list[dict[str, str]], *, stream: bool) -> Answer:
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    since_s = time.monotonic()
    if not stream:
        raw = await client.chat.completions.with_raw_response.create(**request)
        choice = raw.parse().choices[0]
        took_ms = (time.monotonic() - since_s) * 1e3
        tokens = list((choice.model_extra or {}).get("token_ids") or [])
        return Answer(choice.message.content or "", tokens, took_ms, raw.headers.get("x-kvbus-transfer", ""))
    raw = await client.chat.completions.with_raw_response.create(**request, stream=True)
    text, first_ms = "", 0.0
    streamed: list[int] = []
    async for chunk in raw.parse():
        for part in chunk.choices:
            first_ms = first_ms or (time.monotonic() - since_s) * 1e3
            text += part.delta.content or ""
            streamed += (part.model_extra or {}).get("token_ids") or []
    return Answer(text, streamed, first_ms, raw.headers.get("x-kvbus-transfer", ""))


async def _stories(fleet: Fleet, transfers: list[str]) -> list[Story]:
    """The stories of these transfers, once their last word is in the trace."""
    assert fleet.bus is not None
    deadline_s = time.monotonic() + TRACE_WAIT_S
    while True:
        stories = stories_of(await lines_of_requests(fleet.bus, since_s=600.0))
        found = [story for transfer in transfers if transfer for story in named(stories, transfer)]
        ended = sum(any(isinstance(line.message, RequestServed) for line in story.lines) for story in found)
        if ended == len(transfers) or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(0.1)
