"""A JetStream KV bucket in which every key has a lifetime. nats-py's own KV takes expired keys for live ones and
drops lifetimes on update, so this speaks to the stream underneath."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kvbus.bus.client import COPIED
from kvbus.bus.errors import JetStreamError, KeyExistsError, NoRespondersError, RevisionError
from kvbus.bus.expiry import lifetime_s
from kvbus.bus.jetstream import NS, WRONG_LAST_SEQUENCE, JetStream, Stored, whole_seconds
from kvbus.bus.watch import Handler, Watch

TOMBSTONE_TTL_S = 2
HINT_MARGIN_S = 60
CREATE_TRIES = 3

Storage = Literal["memory", "file"]
T = TypeVar("T")

NEEDS = ("allow_direct", "allow_msg_ttl", "allow_rollup_hdrs", "subject_delete_marker_ttl")
"""Settings of the stream that are put right where it exists already."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A live key. `remaining_s` is None for a key that was written without a lifetime (never by kvbus)."""

    key: str
    value: bytes
    revision: int
    remaining_s: float | None


def is_gone(headers: dict[str, str]) -> bool:
    """True for the tombstone that stands where a key was deleted, and for what nobody has written (`bus.client`)."""
    return COPIED in headers or headers.get("KV-Operation") in ("DEL", "PURGE")


def bucket_config(name: str, *, ttl_hint_s: float | None, storage: Storage, replicas: int) -> dict[str, Any]:
    """The stream under a bucket: one message per key, and direct reads. No roll-ups: a header with which whoever may
    write one key can wipe all others (so no markers of expired keys either, which need them: see `bus.watch`)."""
    return {
        "name": f"KV_{name}",
        "subjects": [f"$KV.{name}.>"],
        "retention": "limits",
        "discard": "new",
        "storage": storage,
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "max_age": 0 if ttl_hint_s is None else (math.ceil(ttl_hint_s) + HINT_MARGIN_S) * NS,
        "allow_rollup_hdrs": False,
        "deny_delete": True,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": 0,
    }


class Bucket:
    """Keys are dotted names; a `prefix` is a NATS pattern such as `engine.>`. Lifetimes are whole seconds, rounded up,
    and belong to the value: every write gives one, `update(..., ttl_s=entry.remaining_s)` keeps the old end."""

    def __init__(self, jetstream: JetStream, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.stream: str = config["name"]
        self._jetstream = jetstream
        self._config = config
        self._watches: set[Watch] = set()

    async def ensure(self) -> None:
        """The bucket exists; a memory bucket is made again, empty, after its server has gone."""
        await self._jetstream.ensure(self._config, needs=NEEDS)

    async def heal(self) -> None:
        """After a reconnect: the bucket exists and every watch starts over."""
        await self.ensure()
        for watch in list(self._watches):
            watch.reset()

    async def stop_watches(self) -> None:
        """End every watch; nothing is left on the server."""
        for watch in list(self._watches):
            await watch.stop()

    async def get(self, key: str) -> Entry | None:
        """The live value of `key`; None when it is absent, deleted or past its lifetime."""
        stored = await self._last(key)
        return None if stored is None else self._entry(stored)

    async def create(self, key: str, value: bytes, *, ttl_s: float) -> int:
        """Write a key that is not there; its revision. Raises KeyExistsError; of many at once exactly one succeeds."""
        expected = 0
        for _ in range(CREATE_TRIES):
            try:
                return await self._write(key, value, whole_seconds(ttl_s), expected)
            except RevisionError:
                stored = await self._last(key)
                if stored is not None and not is_gone(stored.headers):
                    break
                expected = 0 if stored is None else stored.seq  # what is there is the tombstone of a key that is gone
        raise KeyExistsError(self.name, key)

    async def put(self, key: str, value: bytes, *, ttl_s: float) -> int:
        """Write a key whatever is there; its revision. Its lifetime starts anew."""
        return await self._write(key, value, whole_seconds(ttl_s), None)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float) -> int:
        """Write a key that is still at `revision`; its new revision. Raises RevisionError."""
        return await self._write(key, value, whole_seconds(ttl_s), revision)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Remove a key, with `revision` only if it is still at it (else RevisionError). Its tombstone goes too."""
        await self._write(key, b"", TOMBSTONE_TTL_S, revision, {"KV-Operation": "PURGE"})

    async def entries(self, prefix: str = ">") -> list[Entry]:
        """All live keys under `prefix` with their values, oldest write first. Leaves no consumer behind."""
        pattern = f"$KV.{self.name}.{prefix}"
        found = [self._entry(stored) async for stored in self._jetstream.read(self.stream, pattern)]
        return [entry for entry in found if entry is not None]

    async def keys(self, prefix: str = ">") -> list[str]:
        """All live keys under `prefix`. Leaves no consumer behind."""
        return [entry.key for entry in await self.entries(prefix)]

    async def watch(self, handler: Handler, prefix: str = ">") -> Watch:
        """Call `handler(key, value)` for every live key under `prefix`, then for each change; value None when a key
        is deleted or has expired. Returns once the present keys have been handled. Ends with `await watch.stop()`."""
        watch = Watch(
            self._jetstream,
            handler,
            stream=self.stream,
            subject_prefix=f"$KV.{self.name}.",
            pattern=prefix,
            on_stop=self._watches.discard,
        )
        self._watches.add(watch)
        try:
            await watch.start()
        except BaseException:
            await watch.stop()
            raise
        return watch

    def _entry(self, stored: Stored) -> Entry | None:
        if is_gone(stored.headers):
            return None
        remaining_s: float | None = None
        ttl_s = lifetime_s(stored.headers)
        if ttl_s is not None:
            remaining_s = ttl_s - (self._jetstream.server_unix_s() - stored.unix_s)
            if remaining_s <= 0:
                return None
        key = stored.subject.removeprefix(f"$KV.{self.name}.")
        return Entry(key, stored.data, stored.seq, remaining_s)

    async def _last(self, key: str) -> Stored | None:
        return await self._healing(lambda: self._jetstream.last(self.stream, f"$KV.{self.name}.{key}"))

    async def _write(
        self, key: str, value: bytes, ttl_s: int, revision: int | None, headers: dict[str, str] | None = None
    ) -> int:
        given = {"Nats-TTL": str(ttl_s)} | (headers or {})
        if revision is not None:
            given["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        try:
            return await self._healing(lambda: self._jetstream.put(f"$KV.{self.name}.{key}", value, given))
        except JetStreamError as error:
            if revision is not None and error.code in WRONG_LAST_SEQUENCE:
                raise RevisionError(self.name, key, revision) from None
            raise

    async def _healing(self, call: Callable[[], Awaitable[T]]) -> T:
        """Once more after making the bucket again, when its server came back without it."""
        try:
            return await call()
        except NoRespondersError:
            await self.ensure()
            return await call()
