"""The steady load: so many requests at a time, each compared token by token, for as long as the campaign lasts."""

import asyncio
import itertools
import time
from typing import Any

import aiohttp

from kvbus.chaos.answers import Known
from kvbus.chaos.client import Answer, ask
from kvbus.chaos.dice import Dice
from kvbus.chaos.ear import Ear
from kvbus.chaos.score import BROKEN, Outcome, Verdict
from kvbus.chaos.script import Script

REFUSED_WAIT_S = 0.2
"""A client whose connection was refused tries the next request after so long."""
MODES = ("", "", "", "", "early", "deferred", "deferred", "local")
"""X-Kvbus-Mode of a request; empty: the router's default."""


class Clients:
    """Whoever asks the routers on behalf of the campaign. `outcomes` has every request that was to be answered."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        ear: Ear,
        routers: dict[str, str],
        known: Known,
        *,
        seed: int,
        deadline_s: float,
    ) -> None:
        self._http, self._ear, self._routers = http, ear, routers
        self.known, self.deadline_s = known, deadline_s
        self.outcomes: list[Outcome] = []
        self.in_flight = 0
        self._dice = Dice(seed, "load")
        self._numbers = itertools.count(1)

    async def steady(self, stopping: asyncio.Event) -> None:
        """One of the clients that keep asking, until `stopping`."""
        while not stopping.is_set():
            await self.talk(self._dice.one_of(self.known.steady), stopping)

    async def talk(self, script: Script, stopping: asyncio.Event | None = None) -> None:
        """One conversation from its first turn to its last."""
        number = next(self._numbers)
        for turn in range(len(script.turns)):
            if stopping is not None and stopping.is_set():
                return
            outcome = await self._turn(script, turn, f"chaos-{number}")
            if outcome.code in BROKEN:
                await asyncio.sleep(REFUSED_WAIT_S)

    def request_of(self, script: Script, turn: int, conversation: str) -> tuple[str, dict[str, Any], dict[str, str]]:
        """(router, body, headers) of a turn: streamed or not, with or without what prefix caches know, in any mode."""
        dice = self._dice
        body = self.known.body(script, turn) | {"stream": bool(dice.below(2))}
        if dice.below(2):
            body["cache_salt"] = f"{conversation}-{turn}"
        headers = {"X-Request-Id": f"{conversation}-{turn}", "X-Conversation-Id": conversation}
        mode = dice.one_of(MODES)
        return dice.one_of(sorted(self._routers)), body, headers | ({"X-Kvbus-Mode": mode} if mode else {})

    def url(self, router: str) -> str:
        return self._routers[router]

    async def _turn(self, script: Script, turn: int, conversation: str) -> Outcome:
        router, body, headers = self.request_of(script, turn, conversation)
        sent_s, answer = time.monotonic(), Answer()
        verdict: Verdict = "hang"
        self.in_flight += 1
        try:
            answer = await ask(self._http, self.url(router), body, headers, self.deadline_s)
            verdict = self._verdict(script, turn, answer)
            answer.detail = answer.detail if verdict != "wrong" else self._difference(script, turn, answer)
        except TimeoutError:
            pass
        finally:
            self.in_flight -= 1
        outcome = Outcome(
            request_id=headers["X-Request-Id"],
            script=script.number,
            turn=turn,
            router=router,
            sent_s=sent_s,
            ended_s=time.monotonic(),
            verdict=verdict,
            status=answer.status,
            code=answer.code,
            detail=answer.detail,
            mode=answer.mode,
            reuse=answer.reuse,
        )
        self._learn(outcome, answer)
        self.outcomes.append(outcome)
        return outcome

    def _verdict(self, script: Script, turn: int, answer: Answer) -> Verdict:
        expected = self.known.answers[script.number][turn].tokens
        if not answer.code:
            return "right" if answer.said.tokens == expected else "wrong"
        begun = answer.said.tokens
        return "error" if begun == expected[: len(begun)] else "wrong"

    def _difference(self, script: Script, turn: int, answer: Answer) -> str:
        """Where the tokens part. (They are those of a random test model and say nothing of anybody.)"""
        expected, got = self.known.answers[script.number][turn].tokens, answer.said.tokens
        same = next((at for at, both in enumerate(zip(expected, got, strict=False)) if both[0] != both[1]), len(got))
        return (
            f"{answer.detail} from token {same} of {len(expected)}: {got[same:]} instead of {expected[same:]}".strip()
        )

    def _learn(self, outcome: Outcome, answer: Answer) -> None:
        """What the bus says of the request."""
        latest = self._ear.routes.get(outcome.request_id)
        outcome.transfer_id = answer.transfer_id or (latest.transfer_id if latest else "")
        outcome.closed = self._ear.closed_of(outcome.transfer_id)
        route = self._ear.dispatches.get(outcome.transfer_id)  # of several dispatches the one that was answered
        if route is not None:
            outcome.prefill_id, outcome.decode_id = route.prefill_id, route.decode_id
