"""The right answers: what a plain engine says to every script, asked before the first fault."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from kvbus.chaos.client import ask
from kvbus.chaos.script import Said, Script
from kvbus.errors import CommandFailed

AT_A_TIME = 8
DEADLINE_S = 120.0
GAP_MIN = 1e-3
"""Where two tokens are nearer than this in log probability, rounding may decide; such a script is not used."""


class Known(msgspec.Struct):
    """Scripts with their answers."""

    steady: list[Script]
    long: list[Script]
    cut: list[Script]
    answers: dict[int, list[Said]]
    """By a script's number."""
    model: str

    def body(self, script: Script, turn: int) -> dict[str, Any]:
        return {"model": self.model} | script.body(turn, self.answers[script.number])


async def learn(http: aiohttp.ClientSession, url: str, model: str, scripts: list[Script]) -> Known:
    """Raises CommandFailed when the plain engine does not answer."""
    answers: dict[int, list[Said]] = {}
    todo = iter(scripts)

    async def some() -> None:
        for script in todo:
            said = await _all_turns(http, url, model, script)
            if said is not None:
                answers[script.number] = said

    await asyncio.gather(*(some() for _ in range(AT_A_TIME)))
    usable = [script for script in scripts if script.number in answers]
    by_use = {use: [script for script in usable if script.use == use] for use in ("steady", "long", "cut")}
    for use, found in by_use.items():
        if not found:
            raise CommandFailed(f"no answer of the model is certain enough to compare with ({use}): take another seed")
    return Known(by_use["steady"], by_use["long"], by_use["cut"], answers, model)


async def _all_turns(http: aiohttp.ClientSession, url: str, model: str, script: Script) -> list[Said] | None:
    """None where rounding could decide about a token."""
    said: list[Said] = []
    for turn in range(len(script.turns)):
        body = {"model": model} | script.body(turn, said)
        body |= {"logprobs": True, "top_logprobs": 2} if script.chat else {"logprobs": 2}
        body["return_tokens_as_token_ids"] = True  # else two bytes that are no text have one name
        answer = await ask(http, url, body, {}, DEADLINE_S)
        if answer.code:
            raise CommandFailed(f"the plain engine answered {answer.status} {answer.code}: {answer.detail}")
        if answer.gap < GAP_MIN:
            return None
        said.append(answer.said)
    return said
