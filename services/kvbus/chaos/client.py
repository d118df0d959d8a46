"""One request as a client sends it, and what came back: an answer, an error, or a connection that broke."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from kvbus.chaos.script import Said

DETAIL_CHARS_MAX = 300


class Answer(msgspec.Struct):
    """What a client got. `code` is empty for an answer that is whole."""

    status: int = 0
    code: str = ""
    detail: str = ""
    said: Said = Said([], "")
    transfer_id: str = ""
    mode: str = ""
    reuse: str = ""
    gap: float = 9.0
    """The least difference of log probability between a token and the next best, where it was asked for."""


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def ask(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], deadline_s: float
) -> Answer:
    """Raises TimeoutError when there is no end after `deadline_s`."""
    answer = Answer()
    try:
        async with asyncio.timeout(deadline_s):
            await _exchange(http, url, body, headers, answer)
    except aiohttp.ClientConnectorError as error:
        answer.code, answer.detail = "connection_refused", str(error)[:DETAIL_CHARS_MAX]
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.code, answer.detail = "connection_broken", repr(error)[:DETAIL_CHARS_MAX]
    return answer


async def _exchange(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], answer: Answer
) -> None:
    async with http.post(url + path_of(body), json=body, headers=headers) as response:
        answer.status = response.status
        answer.transfer_id = response.headers.get("X-Kvbus-Transfer", "")
        answer.mode = response.headers.get("X-Kvbus-Mode", "")
        answer.reuse = response.headers.get("X-Kvbus-Reuse", "")
        data = await response.read()
    if answer.status != HTTPStatus.OK:
        _take_error(answer, data)
    elif body.get("stream"):
        _take_stream(answer, data)
    else:
        _take_whole(answer, data)


def _take_error(answer: Answer, data: bytes) -> None:
    """An error is clear when it is OpenAI's JSON with a code and words."""
    answer.code, answer.detail = "no_error_json", data[:DETAIL_CHARS_MAX].decode(errors="replace")
    try:
        error = json.loads(data)["error"]
        answer.code, answer.detail = str(error["code"]), str(error["message"])[:DETAIL_CHARS_MAX]
    except (ValueError, LookupError, TypeError):
        return


def _take_stream(answer: Answer, data: bytes) -> None:
    lines = data.split(b"\n")
    events = [_loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    errors = [event["error"] for event in events if isinstance(event.get("error"), dict)]
    answer.said = _said([choice for event in events for choice in event.get("choices", ())])
    if errors:
        answer.code = f"stream_{errors[0].get('code')}"
        answer.detail = str(errors[0].get("message"))[:DETAIL_CHARS_MAX]
    elif b"data: [DONE]" not in lines:
        answer.code, answer.detail = "stream_cut_short", data[-100:].decode(errors="replace")


def _loads(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        return {}  # half an event, before an error that says why
    return event


def _take_whole(answer: Answer, data: bytes) -> None:
    try:
        choices = json.loads(data)["choices"]
    except (ValueError, LookupError):
        answer.code, answer.detail = "no_answer_json", data[:DETAIL_CHARS_MAX].decode(errors="replace")
        return
    answer.said, answer.gap = _said(choices), _gap(choices[0].get("logprobs"))


def _said(choices: list[dict[str, Any]]) -> Said:
    tokens: list[int] = []
    text = ""
    for choice in choices:
        tokens += choice.get("token_ids") or ()
        words = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        text += words.get("content") or ""
    return Said(tokens, text)


def _gap(logprobs: dict[str, Any] | None) -> float:
    """vLLM's two forms: a list of dictionaries (completions), or of entries with `top_logprobs` (chat)."""
    tops = (logprobs or {}).get("top_logprobs") or []
    values = [sorted(top.values(), reverse=True) for top in tops if top]
    entries = (logprobs or {}).get("content") or []
    values += [sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True) for entry in entries]
    return min((value[0] - value[1] for value in values if len(value) > 1), default=9.0)
