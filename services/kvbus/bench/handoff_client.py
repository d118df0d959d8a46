"""Requests to one arm of `kvbus bench handoff`, straight to its engines: the same client for every arm."""

import asyncio
import http
import json
import random
import time
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvbus.bench.handoff_arms import ArmProcesses
from kvbus.errors import CommandFailed
from kvbus_schemas import Role, Ticket

T = TypeVar("T")

PATH = "/v1/completions"
TIMEOUT_S = 180.0
TOKENS_FROM, TOKENS_TO = 3, 250
"""The seeded model's ordinary tokens."""
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

ADDRESS = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
"""What a decode leg of stock push must say about its prefill."""


class Answer(msgspec.Struct, frozen=True):
    """What came back for one request."""

    request_id: str
    tokens: list[int]
    ttft_s: float
    tpot_s: float
    """Time per output token after the first."""


class Client:
    """Talks to one arm. `learn` must have run once for stock push, which has to know prefill's address up front."""

    def __init__(self, arm: ArmProcesses, session: aiohttp.ClientSession) -> None:
        self.arm, self._http = arm, session
        self._known = arm.known

    async def learn(self) -> None:
        """What a router of stock push learns from a first serial request."""
        if self.arm.spec.legs == "push" and not self._known:
            prompt, request_id = prompt_of("learn", 40), uuid.uuid4().hex
            params = await self._prefill(prompt, request_id, PREFILL_PARAMS)
            self._known.update({name: params[name] for name in ADDRESS})
            _, consume = self._params(request_id)
            await self._decode(prompt, request_id, consume, 2, time.monotonic())

    async def ask(
        self, prompt: list[int], max_tokens: int, *, first: Role | None = None, wait_s: float = 0.0
    ) -> Answer:
        """One request. With `first`, that leg starts `wait_s` before the other."""
        request_id, since_s = uuid.uuid4().hex, time.monotonic()
        if self.arm.spec.legs == "pull":
            params = await self._prefill(prompt, request_id, PREFILL_PARAMS)
            if first == "prefill":
                await asyncio.sleep(wait_s)
            return await self._decode(prompt, request_id, params, max_tokens, since_s)
        produce, consume = self._params(request_id)
        late = {role: wait_s if first and role != first else 0.0 for role in ("prefill", "decode")}
        both = await asyncio.gather(
            _later(late["prefill"], self._prefill(prompt, request_id, produce)),
            _later(late["decode"], self._decode(prompt, request_id, consume, max_tokens, since_s)),
        )
        answer: Answer = both[1]
        return answer

    def _params(self, request_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.arm.spec.legs == "push":
            consume = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request_id}
            return PREFILL_PARAMS, consume | self._known
        ticket = Ticket(
            transfer_id=request_id,
            role="produce",
            mode="early",
            producer_id="prefill",
            producer_incarnation=self.arm.incarnations["prefill"],
            consumer_id="decode",
            consumer_incarnation=self.arm.incarnations["decode"],
            request_id=request_id,
        )
        return ticket.to_params(), msgspec.structs.replace(ticket, role="consume").to_params()

    async def _prefill(self, prompt: list[int], request_id: str, params: dict[str, Any]) -> dict[str, Any]:
        body = _body(prompt, 1, params)
        async with self._http.post(
            self.arm.urls["prefill"] + PATH, data=body, headers=_headers(request_id)
        ) as response:
            answer = await response.read()
            _check(response.status, answer)
        return json.loads(answer).get("kv_transfer_params") or {}

    async def _decode(
        self, prompt: list[int], request_id: str, params: dict[str, Any], max_tokens: int, since_s: float
    ) -> Answer:
        body = _body(prompt, max_tokens, params, stream=True)
        first_s = last_s = 0.0
        raw = b""
        async with self._http.post(self.arm.urls["decode"] + PATH, data=body, headers=_headers(request_id)) as response:
            async for chunk in response.content.iter_any():
                last_s = time.monotonic()
                first_s = first_s or last_s
                raw += chunk
            _check(response.status, raw)
        tokens = tokens_of(raw)
        if len(tokens) != max_tokens:
            raise CommandFailed(f"{self.arm.spec.name}: {len(tokens)} tokens instead of {max_tokens}: {raw[-300:]!r}")
        return Answer(request_id, tokens, first_s - since_s, (last_s - first_s) / max(max_tokens - 1, 1))


def prompt_of(seed: str, length: int) -> list[int]:
    """A random prompt, the same for every arm."""
    chosen = random.Random(seed)  # noqa: S311  (reproducible, not secret)
    return [chosen.randrange(TOKENS_FROM, TOKENS_TO) for _ in range(length)]


def tokens_of(stream: bytes) -> list[int]:
    """The token ids in an event stream."""
    tokens: list[int] = []
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise CommandFailed(f"an engine answered: {event['error']}")
            tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    return tokens


async def load(client: Client, prompts: list[list[int]], max_tokens: int, concurrency: int) -> list[Answer]:
    """Send the prompts, so many at a time; answers in the order of the prompts."""
    answers: dict[int, Answer] = {}
    todo = iter(enumerate(prompts))

    async def one() -> None:
        for number, prompt in todo:
            answers[number] = await client.ask(prompt, max_tokens)

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return [answers[number] for number in range(len(prompts))]


async def _later(wait_s: float, leg: Awaitable[T]) -> T:
    await asyncio.sleep(wait_s)
    return await leg


def _body(prompt: list[int], max_tokens: int, params: dict[str, Any], *, stream: bool = False) -> bytes:
    request = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        "kv_transfer_params": params,
    }
    return msgspec.json.encode(request)


def _headers(request_id: str) -> dict[str, str]:
    return {"content-type": "application/json", "X-Request-Id": request_id}


def _check(status: int, answer: bytes) -> None:
    if status != http.HTTPStatus.OK:
        raise CommandFailed(f"an engine answered {status}: {answer[:300]!r}")
