"""One arm's clients: conversations through the router, streamed, and what came of every turn."""

import asyncio
import json
import time
import uuid
from typing import Any

import aiohttp
import msgspec

from kvbus.bench.handoff_client import PATH
from kvbus.bench.traffic_shape import Conversation, Shape
from kvbus.bench.workload_replay import OK, reused_in

FAILED_CHARS_MAX = 200


class Way(msgspec.Struct, frozen=True):
    """One way to serve the traffic. `mode` empty: what the router chooses."""

    name: str
    mode: str
    reuse: bool = False


WAYS = (
    Way("local", "local"),
    Way("early", "early"),
    Way("deferred", "deferred"),
    Way("early+reuse", "early", reuse=True),
    Way("router's choice", "", reuse=True),
    Way("pull", "pull"),
)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. Times in seconds; `failed` empty: it was answered whole."""

    later: bool
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: list[int] = []
    reused: int = 0
    missed: str = ""
    mode: str = ""
    failed: str = ""


class Crowd:
    """All conversations of one round with one arm."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, way: Way, shape: Shape) -> None:
        self._http, self._url, self._model, self._way, self._shape = http, url, model, way, shape
        self._salt = uuid.uuid4().hex
        """So that an arm finds nothing in a prefix cache that another one has left there."""

    async def talk(self, conversations: list[Conversation]) -> list[list[Turn]]:
        """Every conversation's turns, in order."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(conversation)) for conversation in conversations]
        return [task.result() for task in tasks]

    async def _one(self, conversation: Conversation) -> list[Turn]:
        await asyncio.sleep(conversation.start_s)
        key, prompt, turns = uuid.uuid4().hex, list[int](), list[Turn]()
        for added, gap_s in zip(conversation.added, conversation.gaps_s, strict=True):
            await asyncio.sleep(gap_s)
            prompt = prompt + added
            turns.append(await self._turn(prompt, key, later=bool(turns)))
            if turns[-1].failed:
                break
            prompt = prompt + turns[-1].tokens
        return turns

    async def _turn(self, prompt: list[int], key: str, *, later: bool) -> Turn:
        headers = {"X-Kvbus-Mode": self._way.mode} if self._way.mode else {}
        since_s = time.monotonic()
        try:
            async with self._http.post(self._url + PATH, json=self._body(prompt, key), headers=headers) as response:
                if response.status != OK:
                    text = (await response.text())[:FAILED_CHARS_MAX]
                    return Turn(later=later, failed=f"{response.status} {text}")
                return await self._read(response, since_s, later=later)
        except (aiohttp.ClientError, TimeoutError) as error:
            return Turn(later=later, failed=repr(error)[:FAILED_CHARS_MAX])

    async def _read(self, response: aiohttp.ClientResponse, since_s: float, *, later: bool) -> Turn:
        first_s = last_s = 0.0
        tokens, failed = list[int](), ""
        async for line in response.content:
            if line.startswith(b"data: {"):
                last_s = time.monotonic()
                first_s = first_s or last_s
                event = json.loads(line[6:])
                failed = str(event["error"])[:FAILED_CHARS_MAX] if "error" in event else failed
                tokens += [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
        said = response.headers.get("X-Kvbus-Reuse", "")
        return Turn(
            later=later,
            ttft_s=first_s - since_s,
            tpot_s=(last_s - first_s) / max(len(tokens) - 1, 1),
            tokens=tokens,
            reused=reused_in(said),
            missed=said.rpartition("reason=")[2] if said.startswith("miss") else "",
            mode=response.headers.get("X-Kvbus-Mode", ""),
            failed=failed or ("" if len(tokens) == self._shape.answer_tokens else f"{len(tokens)} tokens"),
        )

    def _body(self, prompt: list[int], key: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._shape.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "cache_salt": self._salt,
        }
        return body | {"conversation_id": key} if self._way.reuse else body
