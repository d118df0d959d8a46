"""What the campaign hears on the bus: who serves which request, how transfers end, loads, dead letters, and the bytes
of everything, to say them again."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from kvbus.auth.setup import OPERATOR
from kvbus.bus.jetstream import JetStream
from kvbus.bus.link import Link
from kvbus.bus.settings import BusSettings
from kvbus.local.fleet import Fleet
from kvbus.trace.core import Line, Story, line_of, stories_of
from kvbus_schemas import (
    AnyMessage,
    LoadReported,
    RouteDecided,
    TransferClosed,
    UndecodableError,
    decode,
    subjects,
)

HEARD_MAX = 60_000
"""Messages that are remembered, some 500 bytes each."""
REQUESTS_MAX = 20_000
LETTERS_MAX = 1000
PENDING_MAX = 65_536


V = TypeVar("V")


class Wire(Protocol):
    """A message as it comes off the bus."""

    subject: str
    data: bytes


class Heard(NamedTuple):
    at_s: float
    subject: str
    data: bytes


class Load(NamedTuple):
    at_s: float
    report: LoadReported


class Ear:
    """Made by `listen`. `on_message` is called for every message that can be decoded."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.jetstream = JetStream(link)
        self.heard: deque[Heard] = deque(maxlen=HEARD_MAX)
        self.routes: OrderedDict[str, RouteDecided] = OrderedDict()
        """The latest dispatch of each request, by its request id."""
        self.dispatches: OrderedDict[str, RouteDecided] = OrderedDict()
        """By transfer id."""
        self.closed: OrderedDict[str, str] = OrderedDict()
        self.loads: dict[str, Load] = {}
        self.letters: deque[str] = deque(maxlen=LETTERS_MAX)
        self.dead_letters = 0
        self.watchers: set[Callable[[AnyMessage], None]] = set()

    async def close(self) -> None:
        await self.link.close()

    async def take(self, msg: Wire) -> None:
        self.heard.append(Heard(time.monotonic(), msg.subject, msg.data))
        try:
            message = decode(msg.data)
        except UndecodableError:
            return
        match message:
            case RouteDecided():
                _keep(self.routes, message.request_id, message)
                _keep(self.dispatches, message.transfer_id, message)
            case TransferClosed():
                _keep(self.closed, message.transfer_id, _end_of(message))
            case LoadReported():
                self.loads[message.engine_id] = Load(time.monotonic(), message)
            case _:
                pass
        for watcher in list(self.watchers):
            watcher(message)

    async def take_letter(self, msg: Wire) -> None:
        self.dead_letters += 1
        self.letters.append(msg.data.decode(errors="replace"))

    async def until(self, request_id: str, kind: type[AnyMessage], within_s: float) -> bool:
        """Wait until the dispatch of a request is spoken of in such a message; False after `within_s`."""
        found = asyncio.Event()

        def look(message: AnyMessage) -> None:
            route = self.routes.get(request_id)
            about = getattr(message, "transfer_id", "")
            if route is not None and about.startswith(route.transfer_id) and isinstance(message, kind):
                found.set()

        self.watchers.add(look)
        try:
            async with asyncio.timeout(within_s):
                await found.wait()
        except TimeoutError:
            return False
        finally:
            self.watchers.discard(look)
        return True

    def about(self, key: str) -> list[Heard]:
        """What was said of a transfer and its parts, oldest first."""
        return [heard for heard in self.heard if heard.subject.rsplit(".", 1)[-1].startswith(key)]

    def story(self, transfer_id: str) -> Story | None:
        """As `kvbus trace show` tells it, from what was heard: the stream is among the things that are hurt."""
        lines = [line for number, heard in enumerate(self.heard) if (line := _line(number, heard)) is not None]
        stories = {story.transfer_id: story for story in stories_of(lines)}
        return stories.get(transfer_id)

    def closed_of(self, transfer_id: str) -> str:
        """How a request's transfer ended; of several parts, the first that did not complete."""
        ends = [end for key, end in self.closed.items() if key == transfer_id] or [
            end for key, end in self.closed.items() if transfer_id and key.startswith(transfer_id + "-")
        ]
        return next((end for end in ends if end != "completed"), ends[0] if ends else "")


async def listen(fleet: Fleet) -> Ear:
    """An ear with the operator's key. Raises BusError."""
    seed = fleet.access.directory / f"{OPERATOR}.nk" if fleet.access.directory else ""
    settings = BusSettings(nats=fleet.nats_url, nkey_seed_file=str(seed), pending_size_bytes=8 * 1024 * 1024)
    ear = Ear(await Link.open(settings, OPERATOR))
    await ear.link.subscribe(subjects.everything(), ear.take, pending_max=PENDING_MAX)
    await ear.link.subscribe(f"{subjects.DEAD_LETTERS}.>", ear.take_letter, pending_max=PENDING_MAX)
    return ear


def _end_of(closed: TransferClosed) -> str:
    """A consumer that needed no transfer says completed, too, and why."""
    return "not needed" if closed.outcome == "completed" and closed.reason else closed.outcome


def _keep(table: OrderedDict[str, V], key: str, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > REQUESTS_MAX:
        table.popitem(last=False)


def _line(number: int, heard: Heard) -> Line | None:
    try:
        return line_of(number, heard.at_s, heard.subject, decode(heard.data))
    except (UndecodableError, ValueError):
        return None
