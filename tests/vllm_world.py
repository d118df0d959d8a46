"""A running fleet and what tests do with it: ask through the router, send legs with tickets, watch the bus."""

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp

from kvbus.local.fleet import Fleet, FleetOptions, start_fleet
from kvbus_schemas import AnyMessage, Message, PushOrdered, Ticket, TransferClosed

Json = dict[str, Any]
Order = Literal["together", "prefill first", "decode first", "decode halfway"]

GREEDY: Json = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
SETTLED_MAX_S = 20.0
SOON_S = 5.0


class World:
    """One fleet with a plain engine beside it."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self.fleet, self.http = fleet, http
        self.heard: list[AnyMessage] = []

    @property
    def model(self) -> str:
        return self.fleet.options.model

    # Asking.

    async def post(self, url: str, body: Json, headers: dict[str, str] | None = None) -> tuple[int, Json, Any]:
        """(status, JSON, headers) of one POST."""
        async with self.http.post(url, json={"model": self.model, **body}, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text), response.headers

    async def routed(self, body: Json, headers: dict[str, str] | None = None, path: str = "completions") -> Json:
        """What the router answers; it must be a 200."""
        status, answer, got = await self.post(f"{self.fleet.base_url}/v1/{path}", {**GREEDY, **body}, headers)
        assert status == 200, answer
        return {**answer, "headers": got}

    async def plain(self, body: Json, path: str = "completions") -> Json:
        """What a plain engine answers."""
        status, answer, _ = await self.post(f"{self.fleet.plain_url}/v1/{path}", {**GREEDY, **body})
        assert status == 200, answer
        return answer

    async def same_as_plain(self, body: Json, headers: dict[str, str] | None = None, path: str = "completions") -> Json:
        """Ask the router; every choice must have the plain engine's tokens."""
        answer, expected = await self.routed(body, headers, path), await self.plain(body, path)
        assert tokens_of(answer) == tokens_of(expected)
        return answer

    # Legs of our own, with tickets of our own.

    async def tickets(self, prefill: str = "prefill-0", decode: str = "decode-0", **more: Any) -> tuple[Ticket, Ticket]:
        """Both engines' tickets for a new transfer."""
        cards = await self.fleet.cards()
        fields: Json = {
            "transfer_id": secrets.token_hex(16),
            "mode": "early",
            "producer_id": prefill,
            "producer_incarnation": cards[prefill].incarnation if prefill in cards else "",
            "consumer_id": decode,
            "consumer_incarnation": cards[decode].incarnation if decode in cards else "",
            "deadline_s": 60.0,
        }
        fields |= more
        return Ticket(role="produce", **fields), Ticket(role="consume", **fields)

    async def prefill_leg(self, ticket: Ticket, prompt: list[int] | list[list[int]]) -> tuple[int, Json]:
        url = self.fleet.engine(ticket.producer_id).url + "/v1/completions"
        body = {**GREEDY, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": ticket.to_params()}
        status, answer, _ = await self.post(url, body)
        return status, answer

    async def decode_leg(
        self, ticket: Ticket, prompt: list[int] | list[list[int]], max_tokens: int = 8, **more: Any
    ) -> tuple[int, Json]:
        url = self.fleet.engine(ticket.consumer_id).url + "/v1/completions"
        body = {**GREEDY, "prompt": prompt, "max_tokens": max_tokens, "kv_transfer_params": ticket.to_params(), **more}
        status, answer, _ = await self.post(url, body)
        return status, answer

    async def hand_over(self, prompt: list[int] | list[list[int]], order: Order = "together", **more: Any) -> str:
        """Both legs in that order; decode's tokens must be a plain engine's. Returns the transfer id."""
        parts = len(prompt) if isinstance(prompt[0], list) else 1
        produce, consume = await self.tickets(parts=parts)
        first, second = self.prefill_leg(produce, prompt), self.decode_leg(consume, prompt, **more)
        if order == "decode first":
            first, second = second, first
        one = asyncio.create_task(first)
        if order == "prefill first":
            await one
        elif order != "together":
            await asyncio.sleep(0.3)
        answers = await asyncio.gather(one, second)
        assert [status for status, _ in answers] == [200, 200], answers
        decoded = answers[0 if order == "decode first" else 1][1]
        expected = await self.plain({"prompt": prompt, "max_tokens": 8, **more})
        assert tokens_of(decoded) == tokens_of(expected)
        return produce.transfer_id

    # The bus.

    def about(self, transfer_id: str) -> list[AnyMessage]:
        """What was said about a transfer (and its parts), in the order in which it was heard."""
        return [message for message in self.heard if message.key.startswith(transfer_id)]

    async def until_heard(self, kind: type[Message], transfer_id: str, within_s: float = SOON_S) -> list[AnyMessage]:
        """Wait for a message of that kind about the transfer."""
        deadline_s = time.monotonic() + within_s
        while True:
            found = [message for message in self.about(transfer_id) if isinstance(message, kind)]
            if found:
                return found
            assert time.monotonic() < deadline_s, f"no {kind.__name__}: {kinds(self.about(transfer_id))}"
            await asyncio.sleep(0.02)

    async def until_heard_ordered(self, transfer_id: str) -> None:
        """Wait until the matcher has ordered the push."""
        await self.until_heard(PushOrdered, transfer_id)

    async def closed(self, transfer_id: str, within_s: float = SOON_S) -> TransferClosed:
        """The consumer's one last word."""
        found = await self.until_heard(TransferClosed, transfer_id, within_s)
        assert len(found) == 1, found
        assert isinstance(found[0], TransferClosed)
        return found[0]

    # Blocks.

    async def usage(self) -> dict[str, float]:
        """Share of blocks in use, by engine."""
        return {
            e.engine_id: await self.metric(e.url, "vllm:kv_cache_usage_perc")
            for e in self.fleet.engines
            if e.role != "plain" and e.child.exit_code is None
        }

    async def metric(self, url: str, name: str) -> float:
        """Sum of one metric over its labels."""
        async with self.http.get(url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " ")))

    async def settled(self, within_s: float = SETTLED_MAX_S) -> None:
        """Every block of every engine must come back."""
        deadline_s = time.monotonic() + within_s
        while any((usage := await self.usage()).values()):
            assert time.monotonic() < deadline_s, f"blocks are still held: {usage}"
            await asyncio.sleep(0.05)


def tokens_of(answer: Json) -> list[list[int]]:
    """The token ids of every choice."""
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]


def kinds(messages: list[AnyMessage]) -> list[str]:
    return [type(message).__name__ for message in messages]


def prompt_of(tokens: int, seed: int) -> list[int]:
    """A prompt that no other seed shares a block with."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, 250) for _ in range(tokens)]


@contextlib.asynccontextmanager
async def world(work_dir: Path, **options: Any) -> AsyncIterator[World]:
    """A fleet, its plain engine and an ear on the bus."""
    async with (
        start_fleet(FleetOptions(work_dir=work_dir, **{"plain": True, **options})) as fleet,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
    ):
        there = World(fleet, http)
        assert fleet.bus is not None

        async def hear(message: AnyMessage) -> None:
            there.heard.append(message)

        await fleet.bus.subscribe("kvbus.v1.transfer.>", hear)
        yield there
