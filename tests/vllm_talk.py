"""Conversations with a fleet of real engines: turns, what should be reused of them, and what each engine computed."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.vllm_world import Json, World, prompt_of, tokens_of, world

from kvbus_schemas import AnyMessage, BlocksRegistered, ReuseOffered, ReuseReleased, TransferClosed

ANSWER = 16
NEW = 100
"""New tokens of a turn: more than a decode that caches would compute itself."""
BLOCK = 32
MIN_TOKENS = 64
PATIENT_MS = "3000"
"""A router of these tests waits so long for the reuse process: a busy machine must not change an outcome."""


@contextlib.asynccontextmanager
async def talking(work_dir: Path, **options: Any) -> AsyncIterator["Talk"]:
    """A fleet whose conversations are watched. Gives every block back at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KVBUS_ROUTER_REUSE_ASK_MS", PATIENT_MS)
        async with world(work_dir, **{"model": "tiny", **options}) as there:
            talk = Talk(there)
            assert there.fleet.bus is not None
            await there.fleet.bus.subscribe("kvbus.v1.reuse.>", talk.hear)
            yield talk


class Talk:
    """What is said on the reuse plane, and turns of conversations."""

    def __init__(self, there: World) -> None:
        self.there = there
        self.heard: list[AnyMessage] = []

    async def hear(self, message: AnyMessage) -> None:
        self.heard.append(message)

    def offers(self) -> list[ReuseOffered]:
        """All offers so far."""
        return [message for message in self.heard if isinstance(message, ReuseOffered)]

    async def ask(
        self, body: Json, conversation: str, path: str = "completions", *, mode: str = "early"
    ) -> tuple[str, Json]:
        """One turn, whose tokens must be a plain engine's: what the reply says of reuse, and the plain answer. Mode
        `early`, also for what a decode would rather compute itself; empty: as the router likes."""
        body = {"max_tokens": ANSWER, **body}
        expected = await self.there.plain(body, path)
        headers = {"X-Kvbus-Mode": mode} if mode else {}
        answer = await self.there.routed({**body, "conversation_id": conversation}, headers, path)
        assert tokens_of(answer) == tokens_of(expected)
        return answer["headers"]["X-Kvbus-Reuse"], expected

    async def stream(self, prompt: list[int], conversation: str, max_tokens: int = ANSWER) -> tuple[str, list[int]]:
        """One streamed turn by the official client: what the reply says of reuse, and the tokens."""
        extra = {"return_token_ids": True, "ignore_eos": True, "conversation_id": conversation}
        url = self.there.fleet.base_url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            reply = await client.completions.with_raw_response.create(
                model=self.there.model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                extra_body=extra,
            )
            tokens: list[int] = []
            async for chunk in reply.parse():
                for choice in chunk.choices:
                    tokens += (choice.model_extra or {}).get("token_ids") or []
            return reply.headers["X-Kvbus-Reuse"], tokens

    async def turns(self, count: int, *, prompt: int = 400, seed: int = 1) -> list[str]:
        """A streamed conversation; every answer must be a plain engine's. What each reply said of reuse."""
        said, conversation, history = [], secrets.token_hex(8), prompt_of(prompt, seed=seed)
        asked: list[tuple[list[int], list[int]]] = []
        for turn in range(count):
            word, tokens = await self.stream(history, conversation)
            said.append(word)
            asked.append((history, tokens))
            history = history + tokens + prompt_of(NEW, seed=1000 * seed + turn)
        for history, tokens in asked:  # afterwards, so that one turn follows the other at once
            assert [tokens] == tokens_of(await self.there.plain({"prompt": history, "max_tokens": ANSWER}))
        return said

    async def by_source(self, role: str) -> dict[str, float]:
        """Prompt tokens of all engines of a role, by where vLLM's own counter says that their KV came from."""
        found: dict[str, float] = {}
        for engine in self.there.fleet.engines:
            if engine.role != role:
                continue
            async with self.there.http.get(engine.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            for line in lines:
                if line.startswith("vllm:prompt_tokens_by_source_total"):
                    source = line.split('source="')[1].split('"')[0]
                    found[source] = found.get(source, 0.0) + float(line.split()[-1])
        return found

    def registered(self, *, reuse: bool) -> list[BlocksRegistered]:
        """Transfers to prefill (`reuse`), or to decode."""
        heard = self.there.heard
        return [message for message in heard if isinstance(message, BlocksRegistered) and message.reuse is reuse]

    def outcome(self, transfer_id: str) -> str:
        """How a transfer has ended."""
        closed = [m for m in self.there.heard if isinstance(m, TransferClosed) and m.transfer_id == transfer_id]
        return closed[0].outcome if closed else "open"

    async def forget_all(self) -> None:
        """Decode lets go of all it keeps, and every block comes back. The last turn's offer may still be on its way."""
        deadline_s = time.monotonic() + 40.0
        while any((usage := await self.there.usage()).values()):
            assert time.monotonic() < deadline_s, f"blocks are still held: {usage}"
            await self._release_offers()
            await asyncio.sleep(0.2)

    async def _release_offers(self) -> None:
        assert self.there.fleet.bus is not None
        for offer in self.offers():
            released = ReuseReleased(
                conversation=offer.conversation, offer_id=offer.offer_id, transfer_id="0" * 32, reason="test"
            )
            await self.there.fleet.bus.publish(released, offer.engine_id)


def tokens_in(answer: Json) -> tuple[list[int], list[int]]:
    """The prompt's and the answer's token ids of a plain engine's answer."""
    (choice,) = answer["choices"]
    return answer.get("prompt_token_ids") or choice["prompt_token_ids"], choice["token_ids"]


def reusable(first: Json, second: Json) -> int:
    """How many tokens of the second prompt a decode that served the first holds, as far as they can be taken back:
    whole blocks up to the first difference, or all that is held, and never the prompt's last token."""
    prompt, answer = tokens_in(first)
    held, wanted = (prompt + answer)[:-1], tokens_in(second)[0]
    common = 0
    while common < min(len(held), len(wanted)) and held[common] == wanted[common]:
        common += 1
    if common < len(held):
        common -= common % BLOCK
    common = min(common, len(wanted) - 1)
    return common if common >= MIN_TOKENS else 0
