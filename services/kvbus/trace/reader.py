"""The trace out of the stream, and live off the bus."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable

from kvbus.bus import Bus, BusSettings
from kvbus.errors import ConfigError
from kvbus.process import new_incarnation, process_name
from kvbus.trace.core import Line, line_of
from kvbus_schemas import AnyMessage, EngineCard, UndecodableError, decode, subjects

STORY_PLANES = ("route", "transfer", "reuse")
"""The planes that speak of requests. Loads and cache events are most of a trace and speak of none."""
POLL_S = 0.2

_SINCE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(text: str) -> float:
    """`90s`, `10m`, `2h`, `1d` in seconds. Raises ConfigError."""
    found = _SINCE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no duration: write for example 90s, 10m, 2h or 1d")
    return float(found[1]) * _UNITS_S[found[2]]


@contextlib.asynccontextmanager
async def reading(settings: BusSettings) -> AsyncIterator[Bus]:
    """A bus to read from."""
    bus = await Bus.connect(settings, name=process_name("trace"), incarnation=new_incarnation())
    try:
        yield bus
    finally:
        await bus.close()


async def lines_of_requests(bus: Bus, since_s: float) -> list[Line]:
    """All that was said about requests in the last `since_s` seconds, oldest first."""
    lines: list[Line] = []
    for plane in STORY_PLANES:
        lines += [line async for line in lines_on(bus, f"{subjects.ROOT}.{plane}.>", since_s)]
    return sorted(lines, key=lambda line: line.seq)


async def lines_on(bus: Bus, subject: str, since_s: float) -> AsyncIterator[Line]:
    """What the stream holds on a subject, not older than `since_s` seconds, oldest first."""
    async for seq, at_s, where, message in bus.replay(subject, since_s=since_s):
        yield line_of(seq, at_s, where, message)


async def cards_on(bus: Bus) -> list[EngineCard]:
    """The cards of the engines that live now."""
    bucket = await bus.bucket(subjects.ENGINES_BUCKET)
    found = []
    for entry in await bucket.entries():
        with contextlib.suppress(UndecodableError):
            found.append(decode(entry.value))
    return [card for card in found if isinstance(card, EngineCard)]


async def follow(bus: Bus, show: Callable[[Line], None], stopping: asyncio.Event) -> None:
    """Call `show` for everything that the stream takes in from now on, until `stopping`."""
    seq = await bus.catch_up(subjects.everything(), _ignore, since_s=0)
    while not stopping.is_set():
        async for found in bus.replay(subjects.everything(), since_seq=seq):
            seq = found[0]
            show(line_of(*found))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), POLL_S)


def _ignore(_message: AnyMessage) -> None:
    pass
