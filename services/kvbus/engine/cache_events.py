"""What an engine says of its prefix cache: the engine's own events in, messages of the cache plane out. Pure.

A mirror of the cache is kept beside the engine, so that only changes are said (vLLM tells every block of a hit once
more), and so that all of it can be said again to whoever came late or has missed something. Every message is counted;
a hole in the count is how a router knows that it has.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from kvbus_schemas import EVERYONE, BlocksRemoved, BlocksStored, CacheCleared, Post, PromptHashed

NAMES_MAX = 8_000
"""Blocks named in one message; 80 KB of the 256 KiB that a message may have."""
NAME_BYTES = 8
HASH_BYTES = 8
"""Of vLLM's hash the last ones go in: all that it publishes itself when it publishes numbers."""
DENSE_ENDS = 16
"""The first blocks of a prompt are all named in PromptHashed, later ones at a sixteenth of their distance."""
KEY_MAX = 64
DEFAULT_KEY = b"kvbus.cache"

EngineHash = bytes | int


class CacheEvent(NamedTuple):
    """One event of an engine's cache. `hashes` are the engine's own, in prompt order where they are stored."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: Sequence[EngineHash] = ()
    parent: EngineHash | None = None


def ends_of(blocks: int) -> list[int]:
    """Which positions of a prompt with so many full blocks are named: the same for every prompt, up to its end."""
    ends, at = [], 1
    while at <= blocks:
        ends.append(at)
        at += max(1, 1 << max(0, at.bit_length() - DENSE_ENDS.bit_length()))
    return ends


class CacheMirror:
    """One engine's cache. `secret` makes the names; engines that share it, and vLLM's hashing, have the same ones."""

    def __init__(self, engine_id: str, block_size: int, secret: str = "") -> None:
        self.engine_id, self.block_size = engine_id, block_size
        self.seq = 0
        """Of the last message."""
        self._key = secret.encode()[:KEY_MAX] or DEFAULT_KEY
        self._names: dict[bytes, None] = {}

    @property
    def blocks(self) -> int:
        """How many blocks the cache has."""
        return len(self._names)

    def name_of(self, of_engine: EngineHash) -> bytes:
        """The block's name on the bus."""
        raw = of_engine.to_bytes(HASH_BYTES, "big") if isinstance(of_engine, int) else of_engine[-HASH_BYTES:]
        return blake2b(raw, digest_size=NAME_BYTES, key=self._key).digest()

    def receive(self, events: Iterable[CacheEvent]) -> list[Post]:
        """Take events in their order. What changes nothing is not said."""
        posts: list[Post] = []
        going: list[bytes] = []
        for event in events:
            if event.kind == "removed":
                going += self._removed(event)
                continue
            posts += self._gone(going)
            going = []
            posts += self._stored(event) if event.kind == "stored" else self._cleared()
        return posts + self._gone(going)

    def restate(self) -> list[Post]:
        """Say all of it again."""
        names = list(self._names)
        begin = CacheCleared(engine_id=self.engine_id, event_seq=self._next(), restates=True, block_count=len(names))
        return [Post(EVERYONE, begin), *self._said(names, None)]

    def hashed(self, transfer_id: str, hashes: Sequence[EngineHash], token_count: int) -> Post:
        """A prompt with these block hashes has come in."""
        ends = ends_of(len(hashes))
        message = PromptHashed(
            engine_id=self.engine_id,
            transfer_id=transfer_id,
            token_count=token_count,
            block_size=self.block_size,
            ends=ends,
            block_hashes=[self.name_of(hashes[end - 1]) for end in ends],
        )
        return Post(EVERYONE, message)

    def _stored(self, event: CacheEvent) -> list[Post]:
        parent = None if event.parent is None else self.name_of(event.parent)
        new: list[bytes] = []
        for of_engine in event.hashes:
            name = self.name_of(of_engine)
            if name in self._names and not new:
                parent = name
            elif name not in self._names:
                self._names[name] = None
                new.append(name)
        return self._said(new, parent)

    def _removed(self, event: CacheEvent) -> list[bytes]:
        names = [self.name_of(of_engine) for of_engine in event.hashes]
        gone = [name for name in names if name in self._names]
        for name in gone:
            self._names.pop(name, None)
        return gone

    def _cleared(self) -> list[Post]:
        self._names.clear()
        return [Post(EVERYONE, CacheCleared(engine_id=self.engine_id, event_seq=self._next()))]

    def _said(self, names: list[bytes], parent: bytes | None) -> list[Post]:
        posts = []
        for some in _parts(names):
            message = BlocksStored(
                engine_id=self.engine_id,
                event_seq=self._next(),
                block_hashes=some,
                parent_hash=parent,
                block_size=self.block_size,
            )
            posts.append(Post(EVERYONE, message))
            parent = some[-1]
        return posts

    def _gone(self, names: list[bytes]) -> list[Post]:
        return [
            Post(EVERYONE, BlocksRemoved(engine_id=self.engine_id, event_seq=self._next(), block_hashes=some))
            for some in _parts(names)
        ]

    def _next(self) -> int:
        self.seq += 1
        return self.seq


def _parts(names: list[bytes]) -> list[list[bytes]]:
    return [names[start : start + NAMES_MAX] for start in range(0, len(names), NAMES_MAX)]
