"""The bus as the processes of kvbus see it: typed messages, requests, key-value buckets, and the past.

Live messages are core NATS; the stream KVBUS captures the same subjects. A process that starts or returns subscribes
first and then calls `catch_up`, so that it sees everything at least once.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvbus.bus.bucket import Bucket, Storage, bucket_config
from kvbus.bus.gaps import GapDetector
from kvbus.bus.inbound import COPY_HEADER, REASON_CHARS_MAX, Handler, Inbound, Rejected
from kvbus.bus.jetstream import JetStream
from kvbus.bus.link import Link
from kvbus.bus.settings import BusCounters, BusSettings
from kvbus.bus.trace import ensure_trace, mark, replay
from kvbus.errors import BusError
from kvbus_schemas import EVERYONE, AnyMessage, Message, Post, UndecodableError, decode, encode, subjects

CATCH_UP_TIMEOUT_S = 60.0
CALLBACK_TIMEOUT_S = 120.0
"""For each callback after a reconnect: none may keep the next ones from being told."""
CALLBACK_AGAIN_S = 1.0
YIELD_EVERY = 100
"""Messages after which a burst of posts lets the loop run; nats-py's publish never does by itself."""
ERROR_HEADER = "Kvbus-Error"

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Responder = Callable[[AnyMessage], Awaitable[Message | None]]


class Subscription:
    """A running subscription."""

    def __init__(self, link: Link, inner: NatsSubscription) -> None:
        self._link = link
        self._inner = inner
        self.subject = str(inner.subject)

    @property
    def dropped(self) -> int:
        """Messages that came while `subscription_pending_max` waited for the handler."""
        return self._link.drops.get(self._inner, 0)

    async def stop(self) -> None:
        """No more calls; what waits for the handler is discarded."""
        await self._link.unsubscribe(self._inner)


class Bus:
    """One process's place on the bus. `name` is what it speaks as; `incarnation` is new at every start."""

    def __init__(self, link: Link, *, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.on_connected: list[Callable[[], Awaitable[None]]] = []
        """Run one after the other after every reconnect, once buckets and watches are healed."""
        self._link = link
        self._jetstream = JetStream(link)
        self._buckets: dict[str, Bucket] = {}
        self._seq = 0
        self._marker = secrets.token_hex(8)  # ranks of one engine share name and incarnation
        self._marks = itertools.count(1)
        self._inbound = Inbound(link, name)
        link.heal = self._heal

    @classmethod
    async def connect(cls, settings: BusSettings, *, name: str, incarnation: str) -> "Bus":
        """On the bus, with the trace's stream in place. Raises BusError that names the URL and what to do."""
        link = await Link.open(settings, subjects.token(name))
        bus = cls(link, name=name, incarnation=incarnation)
        try:
            await ensure_trace(bus._jetstream, settings)
        except BusError:
            await link.close()
            raise
        return bus

    @property
    def connected(self) -> bool:
        """True while NATS is reachable."""
        return self._link.connected

    def server_unix_s(self) -> float:
        """Seconds since 1970 on the clock of the server, which stamps what the stream holds."""
        return self._jetstream.server_unix_s()

    @property
    def last_error(self) -> str:
        """What NATS or the connection last complained of; empty when nothing."""
        return self._link.last_error

    @property
    def counters(self) -> BusCounters:
        """What this process has counted so far."""
        return self._link.counters

    def envelope(self, message: M) -> M:
        """`message` with source, incarnation and time, for a bucket; it is not counted, so `seq` stays as it is."""
        return msgspec.structs.replace(
            message, source=self.name, incarnation=self.incarnation, sent_unix_us=time.time_ns() // 1000
        )

    async def publish(self, message: Message, to: str) -> None:
        """Send `message` to `to` and fill in its envelope. While NATS is away it waits, up to `pending_size_bytes`.

        Raises MessageTooLargeError, and BusError when that is full or permissions forbid it (from the second try on:
        of the first, NATS tells us later; `barrier` raises it).
        """
        subject = subjects.subject_of(message, sender=self.name, to=to)
        await self._counted(message, subject, lambda data: self._link.publish(subject, data))

    async def post(self, posts: Iterable[Post]) -> None:
        """Publish what a core has said, in order."""
        for number, post in enumerate(posts, 1):
            await self.publish(post.message, post.to)
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", rejected: Rejected | None = None
    ) -> Subscription:
        """Call `handler` for each message, serially. Whatever is published after the return arrives.

        Bytes that are no message become dead letters, and `rejected` is told of them; an exception of the handler is
        logged and counted. On `subjects.everything()` gaps in the senders' counts are counted as well.
        """
        gaps = GapDetector() if subject == subjects.everything() and not queue else None

        async def deliver(msg: Msg) -> None:
            message = await self._inbound.decoded(msg, rejected)
            if message is None:
                return
            if gaps is not None:
                self.counters.gaps += gaps.observe(message)
            await self._inbound.handle(handler, message)

        return await self._subscribe(subject, deliver, queue)

    async def observe(self, subject: str, handler: Callable[[str, bytes], None]) -> Subscription:
        """Call `handler(subject, data)` for what is said, as it is. For observers: bytes that are no message are their
        receiver's affair, and `handler` must not raise."""

        async def deliver(msg: Msg) -> None:
            self.counters.received += 1
            if COPY_HEADER not in (msg.headers or {}):
                handler(msg.subject, msg.data)

        return await self._subscribe(subject, deliver, "")

    async def request(self, message: Message, to: str, *, timeout_s: float) -> AnyMessage:
        """Send `message` and wait for the answer. Raises RequestTimeoutError, and BusError when it is denied or the
        responder failed. Nobody listening means a time-out too, since the trace always listens."""
        subject = subjects.subject_of(message, sender=self.name, to=to)
        calls = self._link.calls
        answer = await self._counted(message, subject, lambda data: calls.one(subject, data, timeout_s=timeout_s))
        failure = (answer.headers or {}).get(ERROR_HEADER)
        if failure:
            raise BusError(f"{to} could not answer {subject}: {failure}")
        try:
            return decode(answer.data)
        except UndecodableError as error:
            raise BusError(f"{to} answered {subject} with no message of the bus: {error}") from error

    async def respond(self, subject: str, handler: Responder, *, queue: str = "") -> Subscription:
        """Answer each request with what `handler` returns; None leaves it unanswered. The answer is published to the
        asker on the bus too, so that the trace has it. An exception reaches the asker as BusError at once."""

        async def deliver(msg: Msg) -> None:
            asked = await self._inbound.decoded(msg)
            if asked is None:
                return
            try:
                answer = await handler(asked)
                if answer is not None:
                    await self._answer(answer, asked.source or EVERYONE, msg.reply)
            except Exception as error:
                self._inbound.failed(asked, error)
                if msg.reply:
                    await self._link.publish(msg.reply, b"", {ERROR_HEADER: repr(error)[:REASON_CHARS_MAX]})

        return await self._subscribe(subject, deliver, queue)

    async def bucket(
        self, name: str, *, ttl_hint_s: float | None = None, storage: Storage = "memory", replicas: int = 1
    ) -> Bucket:
        """The bucket `name`, made if it is not there. `ttl_hint_s` is the longest lifetime that its keys will have;
        what somebody writes without one goes a minute after that."""
        if name not in self._buckets:
            config = bucket_config(name, ttl_hint_s=ttl_hint_s, storage=storage, replicas=replicas)
            bucket = Bucket(self._jetstream, name, config)
            await bucket.ensure()
            self._buckets[name] = bucket
        return self._buckets[name]

    async def remove_bucket(self, name: str) -> None:
        """Remove a bucket with all its keys, for everyone."""
        bucket = self._buckets.pop(name, None)
        if bucket is not None:
            await bucket.stop_watches()
        await self._jetstream.api(f"STREAM.DELETE.KV_{name}")

    async def catch_up(
        self, subject: str, handler: Handler, *, since_seq: int = 0, since_s: float | None = None
    ) -> int:
        """Replay into `handler` what the stream holds after `since_seq`, and not older than `since_s` seconds.

        Covers everything that was published, by anyone, before the call; returns the stream's sequence number there,
        which is the next `since_seq`. A stream that was made anew is replayed from its start. At most
        CATCH_UP_TIMEOUT_S, else BusError.
        """
        try:
            async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
                end = await mark(self._jetstream, self._marker, next(self._marks))
                after = since_seq if since_seq <= end else 0
                async for seq, _, _, message in self.replay(subject, since_seq=after, since_s=since_s):
                    if seq > end:
                        break
                    await self._inbound.handle(handler, message)
        except TimeoutError:
            raise BusError(f"catching up on {subject} took over {CATCH_UP_TIMEOUT_S} s") from None
        return end

    async def replay(
        self, subject: str, *, since_seq: int = 0, since_s: float | None = None, limit: int | None = None
    ) -> AsyncIterator[tuple[int, float, str, AnyMessage]]:
        """What the stream holds: (sequence number, time stored in seconds since 1970, subject, message), oldest
        first, at most `limit`. What cannot be decoded is left out."""
        async for found in replay(self._jetstream, subject, since_seq=since_seq, since_s=since_s, limit=limit):
            yield found

    async def barrier(self) -> None:
        """The server has taken all that was published. Raises DeniedError if it refused any of it."""
        await self._link.barrier()
        self._link.denials.check_all()

    async def close(self) -> None:
        """Stop the watches, let the handlers finish, leave. Bounded."""
        for bucket in self._buckets.values():
            await bucket.stop_watches()
        await self._link.close()

    async def _subscribe(self, subject: str, deliver: Callable[[Msg], Awaitable[None]], queue: str) -> Subscription:
        pending_max = self._link.settings.subscription_pending_max
        inner = await self._link.subscribe(subject, deliver, queue=queue, pending_max=pending_max)
        return Subscription(self._link, inner)

    async def _counted(self, message: Message, subject: str, send: Callable[[bytes], Awaitable[T]]) -> T:
        """Number the message and send it. `send` hands it over before it first waits, so that numbers go out in
        order; what is refused gets no number."""
        data = encode(msgspec.structs.replace(self.envelope(message), seq=self._seq + 1))
        self._link.check(subject, len(data))
        self._seq += 1
        self.counters.published += 1
        return await send(data)

    async def _answer(self, answer: Message, to: str, reply: str) -> None:
        subject = subjects.subject_of(answer, sender=self.name, to=to)

        async def send(data: bytes) -> None:
            await self._link.publish(subject, data)
            if reply:
                await self._link.publish(reply, data)

        await self._counted(answer, subject, send)

    async def _heal(self) -> None:
        """After a reconnect: what the server lost is made again, watches start over, then the callbacks catch up."""
        await ensure_trace(self._jetstream, self._link.settings)
        for bucket in list(self._buckets.values()):
            await bucket.heal()
        waiting = list(self.on_connected)
        while waiting and self.connected:
            waiting = [callback for callback in waiting if not await self._told(callback)]
            await asyncio.sleep(CALLBACK_AGAIN_S if waiting else 0)

    async def _told(self, callback: Callable[[], Awaitable[None]]) -> bool:
        """False: NATS did not serve it yet, as just after a start; it has to be called again."""
        try:
            async with asyncio.timeout(CALLBACK_TIMEOUT_S):
                await callback()
        except (BusError, TimeoutError) as error:
            log.warning("on_connected_again", error=repr(error))
            return False
        except Exception as error:
            self.counters.handler_errors += 1
            log.exception("on_connected_failed", error=repr(error))
        return True
