"""The engine's thread on the bus: one daemon thread with an asyncio loop per vLLM process, never in the engine loop.

`post` may be called from any thread and returns at once. What comes in is handed to `hear`; cards of other engines
to `seen` and `gone`. The scheduler's link also keeps the engine's card alive and reports its load.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from kvbus.bus import Bus, BusSettings
from kvbus.bus.bounded import end
from kvbus.engine.own_card import BOOT_ID, OwnCard
from kvbus.engine.own_matcher import OwnMatcher
from kvbus.engine.peers import PRESENCE_RENEW_S
from kvbus.errors import BusError
from kvbus.presence import Cards
from kvbus_schemas import (
    EVERYONE,
    DrainOrdered,
    EngineCard,
    LoadReported,
    Message,
    Post,
    UndecodableError,
    decode,
    subjects,
)

log = structlog.get_logger()

POSTS_MAX = 100_000
"""Posts that wait for the bus; over it the newest are dropped and counted."""
LOAD_EVERY_S = 0.5
LOAD_AT_LEAST_S = 2.0
CONNECT_AGAIN_S = 1.0
KEEP_TIME_S = 0.25


@dataclass
class LinkHandlers:
    """What the process does with what comes in. Called on the link's thread; must not block."""

    hear: Callable[[Message], None]
    seen: Callable[[EngineCard], None]
    gone: Callable[[str], None]
    card: Callable[[], EngineCard | None] | None = None
    """The engine's own card, once it can be told; None in a rank's process."""
    load: Callable[[], LoadReported | None] | None = None
    keep_time: Callable[[], None] | None = None
    """Called a few times a second."""


@dataclass
class LinkState:
    own_card_s: float = 0.0
    """When the newest card of its own engine that this process has seen was sent, by the monotonic clock: not when it
    was read, since a process that was stopped reads old cards when it goes on."""
    lease: int = 0
    """Lease of that card."""
    dropped: int = 0
    draining: bool = False
    stopping: threading.Event = field(default_factory=threading.Event)


class Link:
    """The bus, for a process that has no event loop. `name` is the sender, `engine_id` the receiver."""

    def __init__(self, settings: BusSettings, *, name: str, engine_id: str, incarnation: str) -> None:
        self.settings = settings
        self.name, self.engine_id, self.incarnation = name, engine_id, incarnation
        self.state = LinkState()
        self.bus: Bus | None = None
        self._posts: queue.SimpleQueue[Post] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._own_card = OwnCard()
        self._cards = Cards()
        self.own_matcher: OwnMatcher | None = None
        self.said: Callable[[Message], None] = _nothing
        """Called with everything that is posted, in the poster's thread."""
        self._handlers: LinkHandlers | None = None

    @property
    def connected(self) -> bool:
        """Whether what is posted now goes out now."""
        return self.bus is not None and self.bus.connected

    def presence_fresh(self, within_s: float) -> bool:
        """Whether our engine's card was seen on the bus within that many seconds."""
        return time.monotonic() - self.state.own_card_s <= within_s

    @property
    def lease(self) -> int:
        """Lease of our engine's card as this process saw it last; 0 before that."""
        return self.state.lease

    @property
    def waiting(self) -> int:
        """Posts that wait for the bus."""
        return self._posts.qsize()

    def start(self, handlers: LinkHandlers) -> None:
        """Start the thread; it connects by itself and tries for ever."""
        self._handlers = handlers
        self._thread = threading.Thread(target=self._run, name=f"kvbus-link-{self.name}", daemon=True)
        self._thread.start()

    def post(self, posts: Iterable[Post]) -> None:
        """Publish soon, in order. From any thread."""
        some = False
        for post in posts:
            some = True
            self.said(post.message)
            if self._posts.qsize() >= POSTS_MAX:
                self.state.dropped += 1
                continue
            self._posts.put(post)
        loop = self._loop
        if some and loop is not None and self._news is not None:
            loop.call_soon_threadsafe(self._news.set)

    def later(self, delay_s: float, work: Callable[[], None]) -> bool:
        """Have the link's thread do this. From any thread. False: the link does not run."""
        if self._loop is None or self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, work)
        return True

    def stop(self, timeout_s: float = 2.0) -> None:
        """Withdraw the card, publish what is left, and end the thread."""
        self.state.stopping.set()
        if self._loop is not None and self._news is not None:
            self._loop.call_soon_threadsafe(self._news.set)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        assert self._handlers is not None
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        bus = await self._join()
        if bus is None:
            return
        self.bus = bus
        tasks = [asyncio.create_task(self._forever(self._pump))]
        try:
            tasks.append(asyncio.create_task(self._forever(self._keep_time)))
            if self._handlers.card is not None:
                tasks.append(asyncio.create_task(self._forever(self._keep_card)))
            if self._handlers.load is not None:
                tasks.append(asyncio.create_task(self._forever(self._report_load)))
            while not self.state.stopping.is_set():  # noqa: ASYNC110  (set from another thread)
                await asyncio.sleep(0.1)
            await self._own_card.withdraw(bus, self.engine_id)
        finally:
            await end(*tasks)
            await bus.close()

    async def _join(self) -> Bus | None:
        """On the bus, and hearing everything. NATS may stop serving at any point of it: then all of it anew."""
        while (bus := await self._connect()) is not None:
            try:
                await bus.subscribe(subjects.addressed_to(self.engine_id), self._hear)
                if self.own_matcher is not None:
                    await self.own_matcher.attach(bus)
                bus.on_connected.append(self._reconnected)
                await (await bus.bucket(subjects.ENGINES_BUCKET)).watch(self._card_changed)
            except BusError as error:
                log.warning("bus_not_joined", error=str(error), again_s=CONNECT_AGAIN_S)
                await bus.close()
                await asyncio.sleep(CONNECT_AGAIN_S)
            else:
                return bus
        return None

    async def _connect(self) -> Bus | None:
        said = False
        while not self.state.stopping.is_set():
            try:
                return await Bus.connect(self.settings, name=self.name, incarnation=self.incarnation)
            except BusError as error:
                if not said:
                    log.warning("bus_unreachable", error=str(error), again_s=CONNECT_AGAIN_S)
                    said = True
                await asyncio.sleep(CONNECT_AGAIN_S)
        return None

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` again and again; a failure is logged, and tried again a little later."""
        while True:
            try:
                await work()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("link_work_failed", work=work.__name__, error=repr(error))
                await asyncio.sleep(0.5)

    async def _pump(self) -> None:
        assert self._news is not None
        while True:
            self._news.clear()  # before the look, which also finds what came before the bus did, or a failure
            while self.bus is not None and not self._posts.empty():
                post = self._posts.get_nowait()
                await self.bus.publish(post.message, post.to)
            await self._news.wait()

    async def _hear(self, message: Message) -> None:
        assert self._handlers is not None
        if isinstance(message, DrainOrdered):
            self.state.draining = True
            if self._handlers.card is not None and self.bus is not None:
                await self._put_card()
            return
        self._handlers.hear(message)

    async def _reconnected(self) -> None:
        self._cards.reconnected(time.monotonic())

    async def _card_changed(self, engine_id: str, value: bytes | None) -> None:
        assert self._handlers is not None
        if value is None:
            self._cards.vanished(engine_id, time.monotonic())
            return
        try:
            card = decode(value)
        except UndecodableError as error:
            log.warning("card_undecodable", engine_id=engine_id, error=str(error))
            return
        if not isinstance(card, EngineCard):
            return
        self._cards.seen(card)
        if self.own_matcher is not None:
            await self.own_matcher.seen(card)
        if (card.engine_id, card.incarnation) == (self.engine_id, self.incarnation):
            self.state.own_card_s = card.put_monotonic_s if card.boot_id == BOOT_ID else time.monotonic()
            self.state.lease = card.lease
        else:
            self._handlers.seen(card)

    async def _keep_time(self) -> None:
        """Tell who is gone: not at once after a reconnect, since the server's restart has taken every card."""
        assert self._handlers is not None
        for engine_id, incarnation in self._cards.gone(time.monotonic()):
            log.info("engine_gone", engine_id=engine_id, incarnation=incarnation)
            if self.own_matcher is not None:
                await self.own_matcher.gone(engine_id, incarnation)
            self._handlers.gone(engine_id)
        if self.own_matcher is not None:
            await self.own_matcher.tick()
        if self._handlers.keep_time is not None:
            self._handlers.keep_time()
        await asyncio.sleep(KEEP_TIME_S)

    async def _keep_card(self) -> None:
        await asyncio.sleep(PRESENCE_RENEW_S if await self._put_card() else 0.05)

    async def _put_card(self) -> bool:
        assert self._handlers is not None and self._handlers.card is not None and self.bus is not None
        card = self._handlers.card()
        if card is None:
            return False
        await self._own_card.put(self.bus, card, draining=self.state.draining)
        return True

    async def _report_load(self) -> None:
        assert self._handlers is not None and self._handlers.load is not None and self.bus is not None
        last: LoadReported | None = None
        last_s = 0.0
        while True:
            load = self._handlers.load()
            now_s = time.monotonic()
            if load is not None and (load != last or now_s - last_s >= LOAD_AT_LEAST_S):
                await self.bus.publish(load, EVERYONE)
                last, last_s = load, now_s
            await asyncio.sleep(LOAD_EVERY_S)


def _nothing(_message: Message) -> None:
    """Nobody counts."""


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
