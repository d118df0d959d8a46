"""A recording against a live `kvbus matcher` on a scratch bus: what it hears is published as it was, in the names of
those who said it, and what it says is compared."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from kvbus.bus import Bus, BusSettings
from kvbus.bus.link import Link
from kvbus.embedded import EmbeddedNats
from kvbus.errors import CommandFailed
from kvbus.local.children import Child, kvbus_command
from kvbus.matcher.service import MATCHER, TICK_S
from kvbus.process import new_incarnation
from kvbus.replay import matcher
from kvbus.replay.compare import Decision, Outcome
from kvbus.replay.pace import Pace
from kvbus.replay.recording import Event, Gone, Recording
from kvbus_schemas import BlocksRegistered, EngineCard, encode, subjects

ME = "replay"
ANSWER_MAX_S = 15.0
"""How long the matcher may take to start, and for any answer."""
ASK_AGAIN_S = 0.3
CARD_TTL_S = 3600.0
SETTLE_S = 0.05
"""What goes through a watch, or over several subscriptions, is there after this time."""


class _Scratch:
    """The bus and the matcher on it."""

    def __init__(self, recording: Recording, link: Link, bus: Bus) -> None:
        self._recording, self._link, self._bus = recording, link, bus
        self._mine = asyncio.Event()
        self._probe = 0
        self._last_kind: type | None = None
        self._said: list[tuple[float, float]] = []

    async def listen(self) -> None:
        """Hear what is said to us."""
        await self._bus.subscribe(subjects.addressed_to(ME), lambda _message: self._mine.set())

    async def ready(self) -> None:
        """The matcher answers."""
        deadline_s = time.monotonic() + ANSWER_MAX_S
        while not await self._answers(ASK_AGAIN_S):
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"the matcher on the scratch bus said nothing for {ANSWER_MAX_S:.0f} s")

    async def say(self, event: Event) -> None:
        """Publish one line as it was. What went before is dealt with first, if it took another way."""
        if self._last_kind is not None and type(event.message) is not self._last_kind:
            await self.ready()
        self._last_kind = type(event.message)
        self._said.append((time.time(), event.at_s))
        message = event.message
        if isinstance(message, Gone | EngineCard):
            bucket = await self._bus.bucket(subjects.ENGINES_BUCKET)
            if isinstance(message, Gone):
                await bucket.delete(message.engine_id)
                await asyncio.sleep(2 * TICK_S)
            else:
                await bucket.put(message.engine_id, encode(message), ttl_s=CARD_TTL_S)
            await asyncio.sleep(SETTLE_S)
        else:
            await self._link.publish(event.subject, encode(message))

    async def _answers(self, timeout_s: float) -> bool:
        """Whether all that was published before is dealt with: a registration of ours comes back refused."""
        self._probe += 1
        self._mine.clear()
        probe = BlocksRegistered(
            transfer_id=f"{self._probe:032x}",
            producer_id=ME,
            consumer_id=ME,
            consumer_incarnation=ME,
            block_ids=[],
            first_block=0,
            token_count=1,
            prompt_digest="",
            block_size=1,
            lease_s=1.0,
        )
        await self._bus.publish(probe, MATCHER)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._mine.wait(), timeout_s)
        return self._mine.is_set()

    async def decisions(self) -> list[Decision]:
        """What the matcher has said, each at the recorded time of the line before it."""
        found = []
        async for _, unix_s, subject, message in self._bus.replay(f"{subjects.ROOT}.transfer.>"):
            sender, to = subject.split(".")[4:6]
            if matcher.is_matcher(self._recording, sender) and to != ME and isinstance(message, matcher.DECISIONS):
                found.append(Decision(message.key, to, self._recorded_s(unix_s), message))
        return found

    def _recorded_s(self, unix_s: float) -> float:
        before = [at_s for said_s, at_s in self._said if said_s <= unix_s]
        return before[-1] if before else self._recording.began_s


async def replay(recording: Recording, pace: Pace, nats: str = "") -> Outcome:
    """Play the recording to a matcher that is started for it, on an embedded nats-server or on `nats`, which must be a
    scratch bus: nothing else may live there. Raises CommandFailed."""
    async with _scratch(recording, nats) as scratch:
        await scratch.ready()
        for event in matcher.inputs_of(recording):
            await asyncio.sleep(pace.wait_s(event.at_s))
            await scratch.say(event)
        await scratch.ready()
        await asyncio.sleep(2 * TICK_S)
        return matcher.outcome_of(recording, await scratch.decisions())


@contextlib.asynccontextmanager
async def _scratch(recording: Recording, nats: str) -> AsyncIterator[_Scratch]:
    async with contextlib.AsyncExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-replay-")))
        url = nats or stack.enter_context(EmbeddedNats()).url
        settings = BusSettings(nats=url)
        bus = await Bus.connect(settings, name=ME, incarnation=new_incarnation())
        stack.push_async_callback(bus.close)
        await _nobody_else(bus)
        link = await Link.open(settings, ME)
        stack.push_async_callback(link.close)
        scratch = _Scratch(recording, link, bus)
        await scratch.listen()
        child = Child(MATCHER, kvbus_command("matcher", "--nats", url), work_dir)
        stack.push_async_callback(child.stop)
        yield scratch


async def _nobody_else(bus: Bus) -> None:
    keys = await (await bus.bucket(subjects.ENGINES_BUCKET)).keys()
    if keys:
        raise CommandFailed(f"engines live on this bus ({', '.join(sorted(keys)[:3])}): a replay needs one of its own")
