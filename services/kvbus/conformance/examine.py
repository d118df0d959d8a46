"""Asks a running router, as kvbus's own router would, and keeps what it answers."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence

from kvbus.bench.report import percentile
from kvbus.bus import Bus
from kvbus.conformance.judge import Heard, Row, judge
from kvbus.conformance.questions import Maker, Question
from kvbus.process import new_incarnation
from kvbus_schemas import EVERYONE, AnyMessage, RouteAnswered, subjects

FIRST_ANSWER_S = 5.0
"""A router that has said nothing after so long is not there."""
FIRST_TRIES = 10
LATE_FACTOR = 4.0
"""An answer is waited for that many deadlines, to tell a late one from none."""
LINGER_S = 0.3
"""After the last question, for answers that should not come."""
UNREADABLE_MAX = 100


class Examiner:
    """One examination of `guest`. `took_ms` are the times of its answers to one question at a time."""

    def __init__(self, bus: Bus, guest: str, deadline_ms: float) -> None:
        self.took_ms: list[float] = []
        self._bus = bus
        self._guest = guest
        self._deadline_ms = deadline_ms
        self._sent_s: dict[str, float] = {}
        self._heard: list[Heard] = []
        self._unreadable: list[str] = []
        self._to_all: set[str] = set()
        self._together = False
        self._arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        prefix = new_incarnation()
        self._maker = Maker((f"{prefix}{number:020x}" for number in itertools.count(1)), deadline_ms)

    async def run(self) -> list[Row]:
        """Ask everything, one after the other, then many at once; the rows. About ten seconds at most where the
        router answers."""
        answers = subjects.of_kind(RouteAnswered, to=self._bus.name)
        subscription = await self._bus.subscribe(answers, self._on_answer, rejected=self._on_rejected)
        try:
            if not await self._is_there():
                return [self._absent()]
            questions = self._maker.simple()
            for question in questions:
                await self._ask(question)
                if question.answers:
                    await self._wait([question])
            burst = self._maker.burst()
            self._together = True
            for question in burst:
                await self._ask(question)
            await self._wait(burst)
            await asyncio.sleep(LINGER_S)
        finally:
            await subscription.stop()
        return judge(self._guest, [*questions, *burst], self._heard, self._unreadable)

    async def _is_there(self) -> bool:
        """It answers, or at least says something: questions before that count for nothing (it may warm up)."""
        for _ in range(FIRST_TRIES):
            question = self._maker.simple()[0]
            await self._ask(question)
            arrived = self._arrived[question.asked.ask_id]
            try:
                await asyncio.wait_for(arrived.wait(), FIRST_ANSWER_S / FIRST_TRIES)
            except TimeoutError:
                if not self._unreadable:
                    continue
            self.took_ms.clear()
            return True
        return False

    def _absent(self) -> Row:
        listen = f"{subjects.ROOT}.route.route_asked.*.{self._guest}.*"
        return Row(
            check="there",
            about="it answers at all",
            passed=False,
            found=f"no answer within {FIRST_ANSWER_S:g} s",
            advice=f"is it running, on this NATS, under the name {self._guest!r}? It must listen on {listen} "
            f"and publish on {subjects.ROOT}.route.route_answered.{self._guest}.<source of the question>.<ask_id>",
        )

    async def _ask(self, question: Question) -> None:
        asked = question.asked
        if question.to == EVERYONE:
            self._to_all.add(asked.ask_id)
        self._sent_s[asked.ask_id] = time.monotonic()
        await self._bus.publish(asked, question.to or self._guest)

    async def _wait(self, questions: Sequence[Question]) -> None:
        """Until all are answered, or would be far too late."""
        waiting = [self._arrived[question.asked.ask_id].wait() for question in questions]
        try:
            async with asyncio.timeout(self._deadline_ms * LATE_FACTOR / 1000.0):
                await asyncio.gather(*waiting)
        except TimeoutError:
            return

    def _on_answer(self, message: AnyMessage) -> None:
        if not isinstance(message, RouteAnswered) or message.ask_id not in self._sent_s:
            return
        if message.ask_id in self._to_all and message.source != self._guest:
            return  # of another router
        took_ms = (time.monotonic() - self._sent_s[message.ask_id]) * 1000.0
        if not self._together:
            self.took_ms.append(took_ms)
        self._heard.append(Heard(message, took_ms))
        self._arrived[message.ask_id].set()

    def _on_rejected(self, subject: str, why: str) -> None:
        if len(self._unreadable) < UNREADABLE_MAX:
            self._unreadable.append(f"{subject}: {why}")
        self._arrived[subject.rpartition(".")[2]].set()


def figures(took_ms: Sequence[float]) -> dict[str, float]:
    """How fast it was, asked one question at a time."""
    if not took_ms:
        return {}
    return {"median_ms": round(percentile(took_ms, 0.5), 3), "p99_ms": round(percentile(took_ms, 0.99), 3)}
