"""Which engines hold which cached blocks, by what they say of it. Pure; times are the caller's monotonic clock.

An engine's messages are counted. The index of an engine is `exact` while it has heard every one of them; from a gap on
it is `degraded`: still used, as it is mostly right, until the engine has restated its cache, for which it is asked.

    (unknown) ──its first message, or a whole restatement──► exact ──gap, reconnect──► degraded ──asked──► restating
                                                               ▲                                               │
                                                               └──────────all that was announced has come──────┘

Repeats and what is older than the newest message change nothing. Engines are those whose cards are known: what another
incarnation says is dropped, and with an incarnation goes all that it held. Bounded in all engines together; an engine
that does not fit stays degraded, and what it cannot store is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvbus.router.cache_heads import Head, hits_first
from kvbus_schemas import BlocksRemoved, BlocksStored, CacheAsked, CacheCleared, Post

State = Literal["exact", "degraded"]
CacheNews = BlocksStored | BlocksRemoved | CacheCleared
ASK_EVERY_S = 2.0
"""An engine that has been asked is asked again after so long."""


class CacheFacts(NamedTuple):
    """What is said of an engine's index, in metrics."""

    blocks: int
    state: State
    gaps: int
    recoveries: int


class _Engine:
    def __init__(self, engine_id: str, incarnation: str, bit: int) -> None:
        self.engine_id, self.incarnation = engine_id, incarnation
        self.bit = bit
        self.blocks: set[bytes] = set()
        self.seq = 0
        self.exact = False
        self.restating = -1
        """Blocks that a restatement announced; -1 while there is none."""
        self.asked_s = float("-inf")
        self.gaps = self.recoveries = 0
        self.cut = False
        """There was no room for all of it; to ask would bring the same again."""


class CacheIndex:
    """At most `blocks_max` blocks, a block that several engines hold counted for each."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.blocks = 0
        self.ignored = 0
        """Messages of engines or incarnations that are not known."""
        self._engines: dict[str, _Engine] = {}
        self._by_bit: dict[int, str] = {}
        self._holders: dict[bytes, int] = {}
        """For each block a bit for each engine that holds it."""

    # Engines

    def follow(self, engines: Mapping[str, str]) -> None:
        """These are the engines that have a cache to follow, with their incarnations; all others are forgotten."""
        for engine in list(self._engines.values()):
            if engines.get(engine.engine_id) != engine.incarnation:
                self._forget(engine)
        for engine_id, incarnation in engines.items():
            if engine_id not in self._engines:
                bit = next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)
                self._by_bit[bit] = engine_id
                self._engines[engine_id] = _Engine(engine_id, incarnation, bit)

    def doubt(self) -> None:
        """The bus was away: something may have been missed that no gap will show."""
        for engine in self._engines.values():
            engine.exact, engine.restating = False, -1

    def due(self, now_s: float) -> list[Post]:
        """Whom to ask for its whole cache now."""
        posts = []
        for engine in self._engines.values():
            engine.cut = engine.cut and self.blocks > self.blocks_max // 2
            if not (engine.exact or engine.cut) and now_s - engine.asked_s >= ASK_EVERY_S:
                engine.asked_s = now_s
                reason = "gap" if engine.gaps else "joined"
                posts.append(Post(engine.engine_id, CacheAsked(engine_id=engine.engine_id, reason=reason)))
        return posts

    def state(self, engine_id: str) -> State | None:
        """How well the engine's cache is known; None where it has none to follow."""
        engine = self._engines.get(engine_id)
        return None if engine is None else _state(engine)

    def incarnation(self, engine_id: str) -> str:
        """The incarnation that the index is of; empty where it has none."""
        engine = self._engines.get(engine_id)
        return engine.incarnation if engine else ""

    def seq(self, engine_id: str) -> int:
        """Number of the newest message of the engine that has come."""
        engine = self._engines.get(engine_id)
        return engine.seq if engine else 0

    def facts(self) -> dict[str, CacheFacts]:
        """By engine."""
        return {
            name: CacheFacts(len(engine.blocks), _state(engine), engine.gaps, engine.recoveries)
            for name, engine in self._engines.items()
        }

    def held(self, engine_id: str) -> frozenset[bytes]:
        """Names of the blocks that the engine holds."""
        engine = self._engines.get(engine_id)
        return frozenset(engine.blocks) if engine else frozenset()

    # News

    def receive(self, news: CacheNews) -> None:
        """An engine has said something of its cache."""
        engine = self._engines.get(news.engine_id)
        if engine is None or engine.incarnation != news.incarnation:
            self.ignored += 1
            return
        if news.event_seq <= engine.seq:
            return
        if news.event_seq != engine.seq + 1:
            engine.gaps += engine.seq > 0
            engine.exact, engine.restating = False, -1
        elif engine.seq == 0:
            engine.exact = True  # its very first word: there was nothing before it
        engine.seq = news.event_seq
        match news:
            case BlocksStored():
                self._store(engine, news.block_hashes)
            case BlocksRemoved():
                self._remove(engine, news.block_hashes)
            case CacheCleared():
                self._clear(engine, news)
        self._restated(engine)

    def hits(self, heads: Sequence[Head]) -> dict[str, int]:
        """Tokens of a prompt with these beginnings that each engine holds; engines with none are left out."""
        found: dict[str, int] = {}
        seen = 0
        for head in hits_first(heads):
            fresh = self._holders.get(head.name, 0) & ~seen
            seen |= fresh
            while fresh:
                lowest = fresh & -fresh
                found[self._by_bit[lowest.bit_length() - 1]] = head.tokens
                fresh ^= lowest
        return found

    def _store(self, engine: _Engine, names: Iterable[bytes]) -> None:
        mask = 1 << engine.bit
        for name in names:
            if name in engine.blocks:
                continue
            if self.blocks >= self.blocks_max:
                engine.exact, engine.restating, engine.cut = False, -1, True
                return
            engine.blocks.add(name)
            self._holders[name] = self._holders.get(name, 0) | mask
            self.blocks += 1

    def _remove(self, engine: _Engine, names: Iterable[bytes]) -> None:
        mask = 1 << engine.bit
        for name in names:
            if name not in engine.blocks:
                continue
            engine.blocks.remove(name)
            self.blocks -= 1
            left = self._holders[name] & ~mask
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]

    def _clear(self, engine: _Engine, news: CacheCleared) -> None:
        if news.restates and engine.exact:
            return
        self._remove(engine, list(engine.blocks))
        if news.restates:
            engine.restating = news.block_count
        else:
            engine.exact = True

    def _restated(self, engine: _Engine) -> None:
        if 0 <= engine.restating <= len(engine.blocks):
            engine.restating = -1
            engine.exact = True
            engine.recoveries += 1

    def _forget(self, engine: _Engine) -> None:
        self._remove(engine, list(engine.blocks))
        del self._engines[engine.engine_id]
        del self._by_bit[engine.bit]


def _state(engine: _Engine) -> State:
    return "exact" if engine.exact else "degraded"
