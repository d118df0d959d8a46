"""The router's place on the bus: cards and loads into the fleet, posts out. It may start before NATS."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict

import structlog

from kvbus.bus import Bus
from kvbus.bus.bounded import end
from kvbus.errors import BusError
from kvbus.router.fleet import Engine, Fleet
from kvbus.router.settings import RouterSettings
from kvbus_schemas import (
    AnyMessage,
    CancelOrdered,
    EngineCard,
    LoadReported,
    MessageTooLargeError,
    Post,
    UndecodableError,
    decode,
    subjects,
)

RETRY_S = 1.0
TICK_S = 1.0
CARD_TTL_S = 6.0

log = structlog.get_logger(__name__)


async def _nothing(_bus: Bus) -> None: ...


class Presence:
    """`replaced` is called with an engine whose successor has shown up: what still waits for it waits in vain."""

    def __init__(
        self, settings: RouterSettings, fleet: Fleet, *, name: str, incarnation: str, replaced: Callable[[Engine], None]
    ) -> None:
        self.fleet = fleet
        self.name = name
        self.unsent = 0
        """Messages that the bus did not take."""
        self.cancelled: Callable[[str], None] = lambda _reason: None
        self.last_error = ""
        self.joined: Callable[[Bus], Awaitable[None]] = _nothing
        """Awaited once, before requests may use the bus. May raise BusError: then it is tried again."""
        self._settings = settings
        self._incarnation = incarnation
        self._replaced = replaced
        self._reconnects = 0
        self._bus: Bus | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """True while NATS is reachable and the engines are known."""
        return self._bus is not None and self._bus.connected

    @property
    def counters(self) -> dict[str, int]:
        """The bus's counters, by name."""
        counted = asdict(self._bus.counters) if self._bus is not None else {}
        return counted | {"unsent": self.unsent}

    async def start(self) -> None:
        """Join the bus, in the background where NATS is not there yet; then keep time for the fleet."""
        await self._try_join()
        self._task = asyncio.create_task(self._keep(), name="router-presence")

    async def post(self, posts: Iterable[Post]) -> None:
        """Publish in order; what the bus does not take is counted, since no request may fail for it."""
        for post in posts:
            if isinstance(post.message, CancelOrdered):
                self.cancelled(post.message.reason)
            if self._bus is None:
                self.unsent += 1
                continue
            try:
                await self._bus.publish(post.message, post.to)
            except (BusError, MessageTooLargeError, subjects.SubjectTokenError) as error:
                self.unsent += 1
                log.warning("post_not_sent", kind=type(post.message).__name__, to=post.to, error=str(error))

    async def close(self) -> None:
        """Leave the bus."""
        if self._task is not None:
            await end(self._task)
        if self._bus is not None:
            await self._bus.close()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S if self._bus is None else TICK_S)
            if self._bus is None:
                await self._try_join()
            self.fleet.tick(time.monotonic())

    async def _try_join(self) -> None:
        try:
            await self._join()
        except BusError as error:
            if str(error) != self.last_error:
                log.warning("bus_unreachable", error=str(error))
            self.last_error = str(error)

    async def _join(self) -> None:
        bus = await Bus.connect(self._settings, name=self.name, incarnation=self._incarnation)
        try:
            await bus.subscribe(subjects.of_kind(LoadReported), self._on_load)
            engines = await bus.bucket(subjects.ENGINES_BUCKET, ttl_hint_s=CARD_TTL_S)
            await engines.watch(self._on_card)
            await self.joined(bus)
        except BusError:
            await bus.close()
            raise
        self._bus = bus
        self.last_error = ""

    def _note_return(self) -> None:
        """A bucket in memory is empty after its server's restart, and says so before anything else."""
        reconnects = self._bus.counters.reconnects if self._bus is not None else 0
        if reconnects != self._reconnects:
            self._reconnects = reconnects
            self.fleet.bus_returned(time.monotonic())

    def _on_card(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._note_return()
            self.fleet.card_gone(key, time.monotonic())
            return
        try:
            card = decode(value)
        except UndecodableError as error:
            log.warning("card_undecodable", engine_id=key, error=str(error))
            return
        if isinstance(card, EngineCard) and card.engine_id == key:
            dead = self.fleet.card_seen(card)
            if dead is not None:
                self._replaced(dead)

    def _on_load(self, message: AnyMessage) -> None:
        if isinstance(message, LoadReported):
            self.fleet.load_seen(message, time.monotonic())
