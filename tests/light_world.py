"""A client of light engines, and what holds of them when nobody asks for anything."""

import asyncio
import json
import time
from typing import Any, NamedTuple

import aiohttp

QUIET_MAX_S = 20.0


class Answer(NamedTuple):
    texts: list[str]
    tokens: list[list[int]]
    headers: dict[str, str]


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any], **headers: str) -> Answer:
    """Ask for a completion or a chat, whole or streamed; raises on anything but an answer."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {"model": "tiny", "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    async with http.post(url + path, json=given | body, headers=named) as response:
        data = await response.text()
        assert response.status == 200, data
        kept = {name.lower(): value for name, value in response.headers.items()}
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")] or [json.loads(data)]
    return _joined(events, kept)


def _joined(events: list[dict[str, Any]], headers: dict[str, str]) -> Answer:
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        said = choice.get("message") or choice.get("delta") or {"content": choice.get("text", "")}
        texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or "")
        tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return Answer([texts[index] for index in sorted(texts)], [tokens[index] for index in sorted(tokens)], headers)


async def all_quiet(http: aiohttp.ClientSession, urls: list[str]) -> None:
    """Return once every engine has every block back; fail after QUIET_MAX_S."""
    deadline_s = time.monotonic() + QUIET_MAX_S
    for url in urls:
        while busy := [value for value in (await gauges(http, url)).values() if value]:
            assert time.monotonic() < deadline_s, (url, busy)
            await asyncio.sleep(0.05)


async def gauges(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    async with http.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted)}
