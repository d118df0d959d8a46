"""The router's ear for the cache plane: which engines hold which beginnings of prompts.

Engines say what enters and leaves their prefix caches and under which names a dispatched prompt goes; routers tell each
other what beginnings became. A router that starts reads back what was learned in the last LEARNED_S from the trace and
asks each engine for its whole cache.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

import structlog

from kvbus.bus import Bus
from kvbus.bus.bounded import end
from kvbus.conversations_client import shared_secret
from kvbus.errors import BusError
from kvbus.router.bodies import Asked
from kvbus.router.cache_heads import Heads, TokenSize
from kvbus.router.cache_index import CacheIndex, State
from kvbus.router.cache_metrics import CacheMetrics
from kvbus.router.cache_prompt import ID_BYTES, NOTHING_READ, TOKEN_BYTES, Prompt, Reading, prompt_of
from kvbus.router.fleet import Fleet
from kvbus.router.settings import RouterSettings
from kvbus_schemas import (
    EVERYONE,
    AnyMessage,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Mode,
    Post,
    PromptHashed,
    PromptMapped,
    RouteDecided,
    subjects,
)

log = structlog.get_logger(__name__)

TICK_S = 0.5
LEARNED_S = 1800.0
"""How far back a starting router reads what was learned."""
SENT_MAX = 4096
"""Prompts that were dispatched and whose blocks have not been named yet."""
CAPABILITY = "cache"

Publish = Callable[[Iterable[Post]], Awaitable[None]]


class Caching:
    """`read` a request before its choice, `sent` it after. Switched off, or without a bus, nothing is known."""

    def __init__(self, settings: RouterSettings, fleet: Fleet, metrics: CacheMetrics, post: Publish) -> None:
        self.index = CacheIndex(settings.cache_blocks_max)
        self.heads = Heads(settings.cache_marks_max)
        self.secret = b""
        """Of the marks; the same for all routers. Empty: prompts are not looked at."""
        self.states: dict[str, State] = {}
        """How well each engine's cache is known."""
        self._settings = settings
        self._on = settings.cache
        self._metrics = metrics
        self._fleet = fleet
        self._post = post
        self._sizes = {False: TokenSize(TOKEN_BYTES), True: TokenSize(ID_BYTES)}
        self._sent: OrderedDict[str, Prompt] = OrderedDict()
        self._bus: Bus | None = None
        self._task: asyncio.Task[None] | None = None

    async def joined(self, bus: Bus) -> None:
        """The router is on the bus. Raises BusError."""
        if not self._on:
            return
        self._bus = bus
        self.secret = await shared_secret(bus, self._settings.reuse_secret)
        await bus.subscribe(f"{subjects.ROOT}.cache.>", self.hear)
        await bus.subscribe(subjects.of_kind(RouteDecided), self.decided)
        await self._remember(bus)
        bus.on_connected.append(self._returned)
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="router-cache")

    async def close(self) -> None:
        """Ask nobody any more."""
        if self._task is not None:
            await end(self._task)

    # Requests

    def read(self, asked: Asked) -> Reading:
        """What is known of this prompt. Takes time with the part of the prompt that is known."""
        prompt = prompt_of(asked.members, asked.model, self.secret) if self._on and asked.parts == 1 else None
        if prompt is None:
            return NOTHING_READ
        heads = self.heads.known(prompt)
        hits = self.index.hits(heads)
        tokens = max(self._sizes[prompt.is_ids].tokens(prompt.size), heads[-1].tokens + 1 if heads else 0)
        return Reading(prompt=prompt, tokens=tokens, hits=self._living(hits), head=prompt.head)

    def sent(self, transfer_id: str, reading: Reading, mode: Mode) -> None:
        """The request is dispatched. Where its prefill gets a ticket, it will name its blocks."""
        if reading.prompt is None or mode not in {"early", "deferred"}:
            return
        self._sent[transfer_id] = reading.prompt
        if len(self._sent) > SENT_MAX:
            self._sent.popitem(last=False)

    def count(self) -> None:
        """Somebody looks at the metrics."""
        self._metrics.show(self.index.facts(), len(self.heads))

    def _living(self, hits: dict[str, int]) -> dict[str, int]:
        """Without engines that have been replaced since the index last followed."""
        engines = self._fleet.engines
        return {name: tokens for name, tokens in hits.items() if name in engines and self._is_current(name)}

    def _is_current(self, engine_id: str) -> bool:
        return self.index.incarnation(engine_id) == self._fleet.engines[engine_id].incarnation

    # The bus

    async def hear(self, message: AnyMessage) -> None:
        """A message of the cache plane."""
        match message:
            case BlocksStored() | BlocksRemoved() | CacheCleared():
                self.index.receive(message)
                self._note(message.engine_id)
            case PromptHashed():
                await self._hashed(message)
            case PromptMapped():
                self.heads.told(message)
            case _:
                pass

    def decided(self, message: AnyMessage) -> None:
        """Another router has chosen: what it sends is on its way, and in no load report yet."""
        if not isinstance(message, RouteDecided) or self._bus is None or message.source == self._bus.name:
            return
        hits = {view.engine_id: view.hit_tokens for view in message.engines}
        work = max(0, message.prompt_tokens - hits.get(message.prefill_id or message.decode_id, 0))
        if message.prefill_id:
            self._fleet.sent_by_others(message.prefill_id, work)
        if message.decode_id:
            self._fleet.sent_by_others(message.decode_id, 0 if message.prefill_id else work)

    async def _hashed(self, hashed: PromptHashed) -> None:
        prompt = self._sent.pop(hashed.transfer_id, None)
        if prompt is None:
            return
        self._sizes[prompt.is_ids].learn(prompt.size, hashed.token_count)
        mapped = self.heads.learn(prompt, hashed)
        if mapped is not None:
            await self._post((Post(EVERYONE, mapped),))

    def follow(self) -> None:
        """The fleet may have changed."""
        engines = self._fleet.engines.values()
        self.index.follow({engine.engine_id: engine.incarnation for engine in engines if engine.says_cache})
        self.states = {name: facts.state for name, facts in self.index.facts().items()}

    def _note(self, engine_id: str) -> None:
        """Its state may have changed."""
        state, before = self.index.state(engine_id), self.states.get(engine_id)
        if state is None or state == before:
            return
        self.states[engine_id] = state
        log.info("cache_state", engine_id=engine_id, state=state, blocks=self.index.facts()[engine_id].blocks)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.follow()
            await self._post(self.index.due(time.monotonic()))

    async def _returned(self) -> None:
        """NATS was away: what was said meanwhile is lost, and the secret may be that of another NATS."""
        self.index.doubt()
        assert self._bus is not None
        self.secret = await shared_secret(self._bus, self._settings.reuse_secret)

    async def _remember(self, bus: Bus) -> None:
        """What routers have learned before. Without it everything still works, and is learned anew: so it is where
        NATS has keys, since a router, which may store what it likes, cannot read the trace back there."""
        if self._settings.nkey_seed_file or self._settings.creds_file:
            return

        def told(message: AnyMessage) -> None:
            if isinstance(message, PromptMapped):
                self.heads.told(message)

        try:
            await bus.catch_up(subjects.of_kind(PromptMapped), told, since_s=LEARNED_S)
        except BusError as error:
            log.warning("cache_not_remembered", error=str(error))
