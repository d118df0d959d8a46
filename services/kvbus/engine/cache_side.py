"""The cache plane inside an engine: events come on the engine's thread, all work with them is done on the link's.

The engine's loop appends to a queue and, for the first thing in it, wakes the link: no hashing, no I/O. What has
gathered by then is said together.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from kvbus.engine.cache_events import CacheEvent, CacheMirror, EngineHash
from kvbus.engine.identity import Identity
from kvbus.engine.link import Link
from kvbus.engine.settings import EngineSettings
from kvbus_schemas import CacheAsked, Message, Post

log = structlog.get_logger()

GATHER_S = 0.005
"""So long the link waits for more after the first event."""
RESTATE_EVERY_S = 0.5
"""The whole cache is said again at most so often: routers that ask in between hear the same words."""


class Hashed(NamedTuple):
    """A prompt that has come in."""

    transfer_id: str
    hashes: Sequence[EngineHash]
    """Of its full blocks."""
    token_count: int


class CacheSide:
    """One engine's part in the cache plane. `on` once somebody feeds it events from the engine's first block on."""

    def __init__(self, identity: Identity, settings: EngineSettings, link: Link) -> None:
        self.on = False
        self._wanted = settings.cache_events
        self._link = link
        self._mirror = CacheMirror(identity.engine_id, identity.block_size, settings.cache_secret)
        self._taken: deque[Sequence[CacheEvent] | Hashed] = deque()
        self._woken = False
        self._asked = False

    @property
    def blocks(self) -> int:
        """Blocks in the engine's prefix cache, as far as it has been told."""
        return self._mirror.blocks

    def begin(self) -> bool:
        """The engine can feed events; False when the settings want none."""
        self.on = self._wanted
        return self.on

    # On the engine's thread.

    def take(self, events: Sequence[CacheEvent]) -> None:
        """What has changed in a step."""
        if events and self.on:
            self._put(events)

    def prompt(self, transfer_id: str, hashes: Sequence[EngineHash], token_count: int) -> None:
        """A prompt has come in; `hashes` is not to be changed any more."""
        if hashes and self.on:
            self._put(Hashed(transfer_id, hashes, token_count))

    def _put(self, what: Sequence[CacheEvent] | Hashed) -> None:
        self._taken.append(what)
        if not self._woken:
            self._woken = self._link.later(GATHER_S, self._work)

    # On the link's thread.

    def hear(self, message: Message) -> bool:
        """A message for this engine; True if it was for the cache plane."""
        if not isinstance(message, CacheAsked):
            return False
        if self.on and not self._asked:
            self._asked = True
            log.info("cache_restated", router=message.source, reason=message.reason, blocks=self._mirror.blocks)
            self._work()
            self._link.post(self._mirror.restate())
            self._link.later(RESTATE_EVERY_S, self._may_ask)
        return True

    def _work(self) -> None:
        self._woken = False
        posts: list[Post] = []
        while self._taken:
            what = self._taken.popleft()
            posts += [self._mirror.hashed(*what)] if isinstance(what, Hashed) else self._mirror.receive(what)
        self._link.post(posts)

    def _may_ask(self) -> None:
        self._asked = False
