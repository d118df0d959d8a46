"""Turns of a conversation with one arm of `kvbus bench multiturn`, straight to its engines, as a router would ask them.

Every request has a `cache_salt`, so that arms that share engines share no prefix cache. On decode it is the
conversation's. On prefill it is the conversation's where the prefix cache is to be on, and new for every request
where it is to be off: then nothing that prefill has computed before is found again.
"""

import asyncio
import http
import json
import re
import time
import uuid
from typing import Any

import aiohttp
import msgspec

from kvbus.bench.handoff_client import PATH, PREFILL_PARAMS, tokens_of
from kvbus.bench.handoff_cpu import cpu_seconds_of
from kvbus.bench.multiturn_arms import Pair
from kvbus.bench.multiturn_params import given_out
from kvbus.conversations_client import ReuseClient
from kvbus.errors import CommandFailed
from kvbus_schemas import ReuseGrant, Ticket

ASK_TIMEOUT_S = 2.0
_SOURCE = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)


class Turn(msgspec.Struct, frozen=True):
    """What one turn came to."""

    ttft_s: float
    tokens: list[int]
    prompt: int
    computed: float
    """Prompt tokens that prefill computed, by vLLM's own counter."""
    cached: float
    """Prompt tokens that prefill found in its prefix cache."""
    taken: float
    """Prompt tokens whose KV prefill was sent by decode."""
    received: float
    """Prompt tokens whose KV decode was sent by prefill."""
    said: str
    ask_s: float = 0.0
    """Of `ttft_s`, the question to the reuse process."""
    cpu_prefill_s: float = 0.0
    """CPU time of prefill's processes over the turn and the pause after it."""
    cpu_decode_s: float = 0.0


class Talk:
    """One conversation with one arm. `think_s` passes after each turn, in every arm."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession, arm: str, *, think_s: float) -> None:
        self.pair, self.arm, self.think_s = pair, arm, think_s
        self._http = session
        self._key = uuid.uuid4().hex
        self._carried: dict[str, Any] = {}
        """Stock: what decode gave out for the next turn."""
        self._reuse = ReuseClient(pair.bus)

    async def turn(self, prompt: list[int], max_tokens: int, *, cache: bool) -> Turn:
        """One turn; `cache`: whether prefill may find its own earlier work. Raises CommandFailed."""
        before = await self._counts()
        request_id, since_s = uuid.uuid4().hex, time.monotonic()
        salts = (self._key if cache else uuid.uuid4().hex, self._key)
        bodies = [_body(prompt, 1, salts[0]), _body(prompt, max_tokens, salts[1])]
        if self.pair.spec.legs == "pull":
            first_s, tokens, said, ask_s = *await self._pull(request_id, *bodies), 0.0
        else:
            first_s, tokens, said, ask_s = await self._push(request_id, *bodies)
        if len(tokens) != max_tokens:
            raise CommandFailed(f"{self.arm}: {len(tokens)} tokens instead of {max_tokens}")
        await asyncio.sleep(self.think_s)
        after = await self._counts()
        counted = {name: after[name] - before[name] for name in after}
        return Turn(first_s - since_s, tokens, len(prompt), said=said, ask_s=ask_s, **counted)

    async def close(self) -> None:
        await self._reuse.close()

    async def _pull(
        self, request_id: str, produce: dict[str, Any], consume: dict[str, Any]
    ) -> tuple[float, list[int], str]:
        """One leg after the other; what decode gives out is carried to the next turn."""
        params = PREFILL_PARAMS | self._carried | {"do_remote_decode": True, "do_remote_prefill": False}
        given = await self._prefill(request_id, produce, params)
        first_s, tokens = await self._decode(request_id, consume, given)
        said = "params carried" if self._carried else "first turn"
        self._carried = await given_out(self.pair.probes, request_id)
        return first_s, tokens, said

    async def _push(
        self, request_id: str, produce: dict[str, Any], consume: dict[str, Any]
    ) -> tuple[float, list[int], str, float]:
        """Both legs at once, with tickets."""
        asked_s, grant, said = time.monotonic(), None, "miss reason=disabled"
        if self.arm == "kvbus_reuse":
            answer = await self._reuse.ask(self._key, ASK_TIMEOUT_S, request_id=request_id)
            grant, said = answer.grant, f"miss reason={answer.miss}"
        ask_s = time.monotonic() - asked_s if self.arm == "kvbus_reuse" else 0.0
        ticket = self._ticket(request_id, grant)
        consumer = msgspec.structs.replace(ticket, role="consume", reuse=None)
        given, (first_s, tokens) = await asyncio.gather(
            self._prefill(request_id, produce, ticket.to_params()),
            self._decode(request_id, consume, consumer.to_params()),
        )
        result = given.get("kvbus") or {}
        if grant is not None:
            taken = result.get("reused_tokens", 0)
            said = f"hit tokens={taken}" if taken else f"miss reason={result.get('reuse', 'nothing said')}"
        return first_s, tokens, said, ask_s

    def _ticket(self, request_id: str, grant: ReuseGrant | None) -> Ticket:
        return Ticket(
            transfer_id=request_id,
            role="produce",
            mode="early",
            producer_id="prefill",
            producer_incarnation=self.pair.incarnations["prefill"],
            consumer_id="decode",
            consumer_incarnation=self.pair.incarnations["decode"],
            request_id=request_id,
            conversation=self._key if self.arm == "kvbus_reuse" else "",
            reuse=grant,
        )

    async def _prefill(self, request_id: str, body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        url, data = self.pair.urls["prefill"] + PATH, msgspec.json.encode(body | {"kv_transfer_params": params})
        async with self._http.post(url, data=data, headers=_headers(request_id)) as response:
            answer = await response.read()
            _check(response.status, answer)
        return json.loads(answer).get("kv_transfer_params") or {}

    async def _decode(self, request_id: str, body: dict[str, Any], params: dict[str, Any]) -> tuple[float, list[int]]:
        """When the first token came, and all of them."""
        data = msgspec.json.encode(body | {"stream": True, "kv_transfer_params": params})
        first_s, raw = 0.0, b""
        async with self._http.post(
            self.pair.urls["decode"] + PATH, data=data, headers=_headers(request_id)
        ) as response:
            async for chunk in response.content.iter_any():
                first_s = first_s or time.monotonic()
                raw += chunk
            _check(response.status, raw)
        return first_s, tokens_of(raw)

    async def _counts(self) -> dict[str, float]:
        prefill, decode = await asyncio.gather(*(self._sources(self.pair.urls[role]) for role in self.pair.urls))
        cpu = cpu_seconds_of(self.pair)
        return {
            "cpu_prefill_s": sum(used_s for name, used_s in cpu.items() if name.startswith("prefill_")),
            "cpu_decode_s": sum(used_s for name, used_s in cpu.items() if name.startswith("decode_")),
            "computed": prefill.get("local_compute", 0.0),
            "cached": prefill.get("local_cache_hit", 0.0),
            "taken": prefill.get("external_kv_transfer", 0.0),
            "received": decode.get("external_kv_transfer", 0.0),
        }

    async def _sources(self, url: str) -> dict[str, float]:
        async with self._http.get(url + "/metrics") as response:
            return sources_in(await response.text())


def sources_in(page: str) -> dict[str, float]:
    """Prompt tokens by source, from an engine's metrics page."""
    return {source: float(value) for source, value in _SOURCE.findall(page)}


def _body(prompt: list[int], max_tokens: int, cache_salt: str) -> dict[str, Any]:
    return {
        "model": "small",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": cache_salt,
    }


def _headers(request_id: str) -> dict[str, str]:
    return {"content-type": "application/json", "X-Request-Id": request_id}


def _check(status: int, answer: bytes) -> None:
    if status != http.HTTPStatus.OK:
        raise CommandFailed(f"an engine answered {status}: {answer[:300]!r}")
