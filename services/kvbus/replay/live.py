"""A recording against a live process on a scratch bus: what it hears is published as it was, in the names of those who
said it, and what it says is compared. What a process hears and says is its `Played`; the rest is the same for all."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvbus.bus import Bus, BusSettings
from kvbus.bus.link import Link
from kvbus.conversations_client import REUSE
from kvbus.embedded import EmbeddedNats
from kvbus.errors import CommandFailed
from kvbus.local.children import Child, kvbus_command
from kvbus.matcher.service import MATCHER, TICK_S
from kvbus.process import new_incarnation
from kvbus.replay import matcher, reuse
from kvbus.replay.compare import Decision, Outcome
from kvbus.replay.pace import Pace
from kvbus.replay.recording import Event, Gone, Recording
from kvbus_schemas import (
    BlocksRegistered,
    EngineCard,
    Message,
    ReuseAnswered,
    ReuseAsked,
    ReuseOffered,
    encode,
    subjects,
)

ME = "replay"
ANSWER_MAX_S = 15.0
"""How long the process may take to start, and for any answer."""
ASK_AGAIN_S = 0.3
CARD_TTL_S = 3600.0
ROUNDS = 3
"""Answers to wait for after each line where lines of several kinds are worked on side by side."""
SETTLE_S = 0.05
"""What goes through a watch, or over several subscriptions, is there after this time."""


@dataclass(frozen=True)
class Played:
    """One kind of process, as a replay sees it."""

    name: str
    """Its command, and what it is addressed as."""
    plane: str
    inputs_of: Callable[[Recording], list[Event]]
    is_one: Callable[[Recording, str], bool]
    """Whether a sender is such a process."""
    decisions: tuple[type[Message], ...]
    outcome_of: Callable[[Recording, list[Decision]], Outcome]
    probe: Callable[[int], Message]
    """A question of ours that it must answer, once it has dealt with all before it."""
    one_by_one: bool
    """Whether a line has to be dealt with before the next is said."""


def _registration(number: int) -> Message:
    """A registration of ours comes back refused."""
    return BlocksRegistered(
        transfer_id=f"{number:032x}",
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


def _look(number: int) -> Message:
    """A look at a conversation that nobody has."""
    return ReuseAsked(conversation=f"{number:032x}", request_id=ME, claim=False)


PLAYED = {
    MATCHER: Played(
        name=MATCHER,
        plane="transfer",
        inputs_of=matcher.inputs_of,
        is_one=matcher.is_matcher,
        decisions=matcher.DECISIONS,
        outcome_of=matcher.outcome_of,
        probe=_registration,
        one_by_one=False,
    ),
    REUSE: Played(
        name=REUSE,
        plane="reuse",
        inputs_of=reuse.inputs_of,
        is_one=reuse.is_reuse,
        decisions=reuse.DECISIONS,
        outcome_of=reuse.outcome_of,
        probe=_look,
        one_by_one=True,
    ),
}


class _Scratch:
    """The bus and the process on it."""

    def __init__(self, recording: Recording, played: Played, link: Link, bus: Bus) -> None:
        self._recording, self._played, self._link, self._bus = recording, played, link, bus
        self._mine = asyncio.Event()
        self._probe = 0
        self._last_kind: type | None = None
        self._said: list[tuple[float, Event]] = []

    async def listen(self) -> None:
        """Hear what is said to us."""
        await self._bus.subscribe(subjects.addressed_to(ME), lambda _message: self._mine.set())

    async def ready(self) -> None:
        """The process answers."""
        deadline_s = time.monotonic() + ANSWER_MAX_S
        while not await self._answers(ASK_AGAIN_S):
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"the {self._played.name} on the scratch bus said nothing for {ANSWER_MAX_S:.0f} s")

    async def say(self, event: Event) -> None:
        """Publish one line as it was. What went before is dealt with first, if it took another way."""
        if self._last_kind is not None and type(event.message) is not self._last_kind:
            await self.ready()
        self._last_kind = type(event.message)
        self._said.append((time.time(), event))
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
            for _ in range(ROUNDS if self._played.one_by_one else 0):
                await self.ready()

    async def _answers(self, timeout_s: float) -> bool:
        """Whether all that was published before is dealt with."""
        self._probe += 1
        self._mine.clear()
        await self._bus.publish(self._played.probe(self._probe), self._played.name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._mine.wait(), timeout_s)
        return self._mine.is_set()

    async def decisions(self, *, original: bool) -> list[Decision]:
        """What the process has said, each at the recorded time of the line before it. At another speed than the
        `original` its clock says nothing of the recording's."""
        found = []
        async for _, unix_s, subject, message in self._bus.replay(f"{subjects.ROOT}.{self._played.plane}.>"):
            sender, to = subject.split(".")[4:6]
            ours = self._played.is_one(self._recording, sender) and isinstance(message, self._played.decisions)
            if ours and to != ME:
                before = self._before(unix_s)
                slot = reuse.slot_of(message, before.number)
                found.append(
                    Decision(message.key, to, before.at_s, message if original else self._aged(message, before), slot)
                )
        return found

    def _aged(self, message: Message, before: Event) -> Message:
        """An answer with the offer's age on the recording's clock."""
        if not isinstance(message, ReuseAnswered) or message.grant is None:
            return message
        offer_id = message.grant.offer_id
        made = (
            event.at_s
            for event in self._recording.events
            if isinstance(event.message, ReuseOffered) and event.message.offer_id == offer_id
        )
        return msgspec.structs.replace(message, age_s=round(before.at_s - next(made, before.at_s), 3))

    def _before(self, unix_s: float) -> Event:
        before = [event for said_s, event in self._said if said_s <= unix_s]
        return before[-1] if before else self._recording.events[0]


async def replay(recording: Recording, pace: Pace, nats: str = "", against: str = MATCHER) -> Outcome:
    """Play the recording to a matcher, or a reuse process, that is started for it, on an embedded nats-server or on
    `nats`, which must be a scratch bus: nothing else may live there. Raises CommandFailed."""
    played = PLAYED[against]
    async with _scratch(recording, played, nats) as scratch:
        await scratch.ready()
        for event in played.inputs_of(recording):
            await asyncio.sleep(pace.wait_s(event.at_s))
            await scratch.say(event)
        await scratch.ready()
        await asyncio.sleep(2 * TICK_S)
        return played.outcome_of(recording, await scratch.decisions(original=pace.factor == 1.0))


@contextlib.asynccontextmanager
async def _scratch(recording: Recording, played: Played, nats: str) -> AsyncIterator[_Scratch]:
    async with contextlib.AsyncExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-replay-")))
        url = nats or stack.enter_context(EmbeddedNats()).url
        settings = BusSettings(nats=url)
        bus = await Bus.connect(settings, name=ME, incarnation=new_incarnation())
        stack.push_async_callback(bus.close)
        await _nobody_else(bus)
        link = await Link.open(settings, ME)
        stack.push_async_callback(link.close)
        scratch = _Scratch(recording, played, link, bus)
        await scratch.listen()
        child = Child(played.name, kvbus_command(played.name, "--nats", url), work_dir)
        stack.push_async_callback(child.stop)
        yield scratch


async def _nobody_else(bus: Bus) -> None:
    keys = await (await bus.bucket(subjects.ENGINES_BUCKET)).keys()
    if keys:
        raise CommandFailed(f"engines live on this bus ({', '.join(sorted(keys)[:3])}): a replay needs one of its own")
