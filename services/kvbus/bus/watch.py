"""Watching a bucket. nats-py's watcher is deaf for 19 s after a server's restart and leaves its consumer behind.

A watch runs in sessions. Each makes a consumer that first delivers the newest message of every key and then what
comes; a missed heartbeat, a hole in the consumer's numbering, an overflow or a reconnect ends it and starts the next
one. What the handler has been told is remembered, so a new session repeats nothing, and a key that vanished
meanwhile (expired unseen, or gone with a memory bucket) is reported as gone.

The server says nothing when a key expires: its markers would need roll-up headers, with which whoever may write one
key can wipe the others. So a watch reckons when each key ends, and then asks the server whether it is still there.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from nats.aio.msg import Msg

from kvbus.bus.bounded import end
from kvbus.bus.calls import status_of
from kvbus.bus.client import ORIGIN
from kvbus.bus.expiry import Expiry, lifetime_s
from kvbus.bus.jetstream import NS, JetStream, unix_of
from kvbus.errors import BusError

HEARTBEAT_S = 0.5
SILENCE_MAX_S = 3 * HEARTBEAT_S
START_TIMEOUT_S = 5.0
RETRY_S = 0.1
WAITING_MAX = 65_536
INACTIVE_S = 10
"""JetStream removes the consumer of a watcher that has died after so long."""

log = structlog.get_logger(__name__)

Handler = Callable[[str, bytes | None], Awaitable[None] | None]


class _SessionOverError(Exception):
    """This session's consumer can no longer be trusted."""


class Watch:
    """One handler on the keys under one pattern. Calls are serial, in the order of the stream."""

    def __init__(
        self,
        jetstream: JetStream,
        handler: Handler,
        *,
        stream: str,
        subject_prefix: str,
        pattern: str,
        on_stop: Callable[["Watch"], None],
    ) -> None:
        self._jetstream = jetstream
        self._stream = stream
        self._subject_prefix = subject_prefix
        self._filter = subject_prefix + pattern
        self._handler = handler
        self._on_stop = on_stop
        self._waiting: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._known: dict[str, str] = {}
        self._expiry = Expiry()
        self._ready = asyncio.Event()
        self._over = False
        self._stopped = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once every present key has been handled; BusError after START_TIMEOUT_S."""
        self._task = asyncio.create_task(self._run(), name=f"watch-{self._stream}")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            raise BusError(f"cannot watch {self._filter}: no answer within {START_TIMEOUT_S} s") from None

    def revision(self, key: str) -> int | None:
        """The revision at which a live key was last told, None for one that is not there."""
        known = self._known.get(key)
        return None if known is None else int(known.partition(".")[0])

    async def stop(self) -> None:
        """No more calls; nothing is left on the server."""
        self._on_stop(self)
        self._stopped = True
        if self._task is not None:
            await end(self._task)

    def reset(self) -> None:
        """Begin a new session, as after a reconnect."""
        self._over = True
        with contextlib.suppress(asyncio.QueueFull):
            self._waiting.put_nowait(None)

    async def _run(self) -> None:
        while not self._stopped:
            try:
                await self._session()
            except (_SessionOverError, TimeoutError):
                log.debug("watch_restarts", filter=self._filter)
            except BusError as error:
                log.debug("watch_waits", filter=self._filter, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _session(self) -> None:
        self._over = False
        waiting: asyncio.Queue[Msg | None] = asyncio.Queue(maxsize=WAITING_MAX)
        self._waiting = waiting

        async def arrived(msg: Msg) -> None:
            try:
                waiting.put_nowait(msg)
            except asyncio.QueueFull:
                self._over = True

        link = self._jetstream.link
        inbox = link.new_inbox()  # taken literally: JetStream sees no interest in a wildcard
        consumer = inbox.rpartition(".")[2]
        subscription = await link.subscribe(inbox, arrived, pending_max=WAITING_MAX)
        try:
            await self._follow(await self._create_consumer(consumer, inbox))
        finally:
            await link.unsubscribe(subscription)
            if link.connected:
                await self._delete_consumer(consumer)

    async def _follow(self, pending: int) -> None:
        """Tell the handler what comes, until the session is over. `pending` messages are the present keys."""
        unseen = set(self._known)
        if pending == 0:
            await self._snapshot_done(unseen)
        delivered = 0
        while True:
            msg = await self._next()
            if msg is None:
                await self._tell_expired()
                continue
            status = status_of(msg)
            if status == "100":
                last = (msg.headers or {}).get("Nats-Last-Consumer", str(delivered))
                self._expect(int(last) == delivered)
                left = 0
            else:
                self._expect(not status)
                key, consumer_seq, left, revision = _position(msg, self._subject_prefix)
                delivered += 1
                self._expect(consumer_seq == delivered)
                unseen.discard(key)
                await self._take(key, revision, msg)
            if pending and left == 0:
                pending = 0
                await self._snapshot_done(unseen)

    async def _next(self) -> Msg | None:
        """The next message, which heartbeats see to that there is; None when a key should have ended before it."""
        self._expect(not self._over)
        due_s = self._expiry.next_s()
        if due_s <= time.monotonic() and self._waiting.empty():
            return None
        silence_s = time.monotonic() + SILENCE_MAX_S
        try:
            async with asyncio.timeout(min(silence_s, due_s) - time.monotonic()):
                msg = await self._waiting.get()
        except TimeoutError:
            self._expect(due_s < silence_s)
            return None
        if msg is None:
            raise _SessionOverError
        return msg

    async def _tell_expired(self) -> None:
        """Keys that are past their end, as far as we know, and that the server has no longer, are gone. One that was
        renewed, which we have yet to hear, is looked for again a little later."""
        due = self._expiry.due(time.monotonic())
        body = {"subjects_filter": self._filter}
        answer = await self._jetstream.api(f"STREAM.INFO.{self._stream}", body)
        there = answer["state"].get("subjects") or {}
        for key in due:
            if self._subject_prefix + key not in there:
                await self._gone(key)

    def _expect(self, holds: bool) -> None:
        if not holds:
            raise _SessionOverError

    async def _take(self, key: str, revision: str, msg: Msg) -> None:
        headers = msg.headers or {}
        if ORIGIN in headers:
            return  # a copy, which somebody has sent there: its owner will write the key again
        if headers.get("KV-Operation") in ("DEL", "PURGE"):
            await self._gone(key)
            return
        ttl_s = lifetime_s(headers)
        if ttl_s is not None:
            self._expiry.keep(key, ttl_s, stored_unix_s=int(revision.partition(".")[2]) / NS)
        if self._known.get(key) != revision:
            self._known[key] = revision
            await self._tell(key, msg.data)

    async def _snapshot_done(self, unseen: set[str]) -> None:
        for key in unseen:
            await self._gone(key)
        self._ready.set()

    async def _gone(self, key: str) -> None:
        self._expiry.forget(key)
        if self._known.pop(key, None) is not None:
            await self._tell(key, None)

    async def _tell(self, key: str, value: bytes | None) -> None:
        try:
            result = self._handler(key, value)
            if result is not None:
                await result
        except Exception as error:
            self._jetstream.link.counters.handler_errors += 1
            log.exception("watch_handler_failed", key=key, error=repr(error))

    async def _create_consumer(self, name: str, inbox: str) -> int:
        """Make this session's consumer; how many messages it will deliver at first."""
        config = {
            "name": name,
            "deliver_subject": inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": self._filter,
            "idle_heartbeat": int(HEARTBEAT_S * NS),
            "inactive_threshold": INACTIVE_S * NS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        call = f"CONSUMER.CREATE.{self._stream}.{name}.{self._filter}"
        body: dict[str, Any] = {"stream_name": self._stream, "config": config, "action": "create"}
        answer = await self._jetstream.api(call, body)
        self._expiry.set_clock(unix_of(answer["created"]))
        return int(answer.get("num_pending", 0)) + int(answer["delivered"]["consumer_seq"])

    async def _delete_consumer(self, name: str) -> None:
        with contextlib.suppress(BusError):  # gone with its server, or soon for want of interest
            await self._jetstream.api(f"CONSUMER.DELETE.{self._stream}.{name}")


def _position(msg: Msg, subject_prefix: str) -> tuple[str, int, int, str]:
    """Key, number within the consumer, how many are still to come, and what identifies this very write."""
    tokens = msg.reply.split(".")
    seq, consumer_seq, stamp, left = tokens[5:9] if len(tokens) == 9 else tokens[7:11]  # noqa: PLR2004  (ADR-15)
    key = msg.subject.removeprefix(subject_prefix)
    return key, int(consumer_seq), int(left), f"{seq}.{stamp}"
