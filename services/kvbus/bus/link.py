"""One connection to NATS that comes back by itself, with the cures for nats-py's traps (the only user of nats-py's
client). What each trap is stands beside its cure."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvbus.auth.seeds import read_seed
from kvbus.bus.bounded import within
from kvbus.bus.callbacks import harmless
from kvbus.bus.calls import Calls
from kvbus.bus.client import Client
from kvbus.bus.denials import Denials
from kvbus.bus.settings import BusCounters, BusSettings
from kvbus.errors import BusError, ConfigError

BARRIER_TIMEOUT_S = 5.0
BARRIER_TRY_S = 1
DRAIN_TIMEOUT_S = 5
CLOSE_TIMEOUT_S = 2.0
FLUSH_TIMEOUT_S = 2.0
OUTSTANDING_PINGS_MAX = 2
CONNECTED_POLL_S = 0.02
HEAL_RETRY_S = 0.5
ALIVE_CHECK_S = 0.25
REFUSED = "authorization violation"

log = structlog.get_logger(__name__)

Callback = Callable[[Msg], Awaitable[None]]


class Link:
    """Core NATS: publish, subscribe, request, barrier. `heal` is called after every reconnect, one call at a time."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.counters = BusCounters()
        self.denials = Denials(name)
        self.drops: WeakKeyDictionary[NatsSubscription, int] = WeakKeyDictionary()
        self.last_error = ""
        self.heal: Callable[[], Awaitable[None]] | None = None
        self._client = Client()
        self._closing = False
        self._refused = False
        self._reconnected = asyncio.Event()
        self._healer: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, settings: BusSettings, name: str) -> "Link":
        """Connect within `connect_timeout_s`, or raise BusError that names the URL and what to do."""
        link = cls(settings, name)
        try:
            await within(settings.connect_timeout_s, link._client.connect(**link._options()))
        except ConfigError as error:
            raise BusError(str(error)) from None  # engines try again: the file may come
        except (TimeoutError, OSError, nats.errors.Error, ValueError) as error:
            await link.close()
            raise BusError(link._unreachable(error)) from None
        link.calls = Calls(f"{link.new_inbox()}.", link._send)
        await link._client.subscribe(f"{link.calls.inbox}*", cb=link.calls.arrived)
        link._healer = asyncio.create_task(link._heal_after_reconnects(), name="bus-heal")
        link._keeper = asyncio.create_task(link._keep_alive(), name="bus-alive")
        return link

    calls: Calls

    @property
    def connected(self) -> bool:
        """True while the connection is up."""
        return bool(self._client.is_connected)

    @property
    def server_version(self) -> str:
        """Version of the nats-server, as it says."""
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    @property
    def server_max_payload(self) -> int:
        """The server's limit on one message, in bytes."""
        return int(self._client.max_payload)

    def new_inbox(self) -> str:
        """A subject of our own that nobody else uses."""
        return str(self._client.new_inbox())

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Hand over to the connection; kept while NATS is away, up to `pending_size_bytes`."""
        await self._send(subject, data, "", headers)

    async def subscribe(
        self, subject: str, callback: Callback, *, queue: str = "", pending_max: int
    ) -> NatsSubscription:
        """Subscribed for certain: whatever others publish after the return is delivered."""
        try:
            subscription = await self._client.subscribe(subject, queue, callback, pending_msgs_limit=pending_max)
        except nats.errors.Error as error:
            raise BusError(f"cannot subscribe to {subject}: {error}") from error
        try:
            await self.barrier()
            self.denials.check_subscribe(subject)
        except BusError:
            await self.unsubscribe(subscription)
            raise
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        """End a subscription; what waits for its handler is discarded."""
        try:
            await subscription.unsubscribe()
        except nats.errors.Error:
            log.debug("already_unsubscribed", subject=subscription.subject)

    async def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """The server has taken all that was sent before. nats-py's own flush() is none: its PING overtakes what is
        pending, so that is pushed out first; a reconnect swallows the PONG, so it is asked for again; and a PONG that
        comes after the time-out of flush() ends nats-py's reader, so nothing here cancels what waits for it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            await self.wait_connected(deadline_s - time.monotonic())
            pong = asyncio.get_running_loop().create_future()
            try:
                await self._client._flush_pending(force_flush=True)  # noqa: SLF001  (there is no public way)
                await self._client._send_ping(pong)  # noqa: SLF001
            except (nats.errors.Error, RuntimeError):
                await self._revive()
            await asyncio.wait({pong}, timeout=BARRIER_TRY_S)
            if pong.done():
                return
            if time.monotonic() > deadline_s:
                raise BusError(f"NATS at {self.settings.nats} did not answer within {timeout_s} s")

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once the connection is up; BusError after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.connected:
            if self._client.is_closed or time.monotonic() > deadline_s:
                raise BusError(self._unreachable(None))
            await asyncio.sleep(CONNECTED_POLL_S)

    async def close(self) -> None:
        """Let handlers finish what they have, then leave; bounded by DRAIN_TIMEOUT_S + CLOSE_TIMEOUT_S."""
        self._closing = True
        for task in (self._healer, self._keeper):
            if task is not None:
                task.cancel()
        try:
            leave = self._client.drain() if self.connected else self._client.close()
            await within(DRAIN_TIMEOUT_S + CLOSE_TIMEOUT_S, leave)
        except (TimeoutError, nats.errors.Error, RuntimeError) as error:  # uvloop's, of a transport that is closed
            log.warning("bus_close_unclean", error=repr(error))

    def check(self, subject: str, size_bytes: int) -> None:
        """Raise BusError where `publish` would."""
        self.denials.check_publish(subject)
        if self._client.is_closed or self._client.is_draining_pubs:
            raise BusError(f"the connection to NATS at {self.settings.nats} is closed")
        if not self.connected and self._client.pending_data_size + size_bytes > self.settings.pending_size_bytes:
            raise BusError(self._unreachable(None))
        if self.connected and size_bytes > self.server_max_payload:
            raise BusError(
                f"{size_bytes} bytes for {subject} are over the server's max_payload of {self.server_max_payload}: "
                "raise max_payload in nats.conf to 1MB"
            )

    async def _send(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> None:
        self.check(subject, len(data))
        try:
            await self._client.publish(subject, data, reply, headers)
        except nats.errors.Error as error:
            raise BusError(f"cannot publish to {subject}: {error}") from error
        except RuntimeError:  # uvloop: the transport is closed, and nats-py has not noticed; it still has the message
            await self._revive()

    async def _keep_alive(self) -> None:
        """nats-py's reader ends on any exception that it does not expect, its writer on a closed transport, both
        without a new connection: the process would be deaf until its pings are missed, or for ever."""
        while True:
            await asyncio.sleep(ALIVE_CHECK_S)
            await self._revive()

    async def _revive(self) -> None:
        """Connect anew if the connection is up in name only."""
        halves = (self._client._reading_task, self._client._flusher_task)  # noqa: SLF001  (there is no public way)
        if self.connected and any(half is None or half.done() for half in halves):
            log.warning("bus_connection_dead", nats=self.settings.nats)
            await self._client.force_reconnect()

    async def _heal_after_reconnects(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            if self.heal is not None:
                try:
                    await self.heal()
                except Exception as error:
                    log.warning("bus_heal_failed", error=repr(error))
                    await asyncio.sleep(HEAL_RETRY_S)
                    self._reconnected.set()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1
            self.drops[error.sub] = self.drops.get(error.sub, 0) + 1
            return
        self.last_error = str(error) or repr(error)
        self._refused |= REFUSED in self.last_error.lower()  # what follows is only the end of that connection
        denied = self.denials.note(self.last_error)
        if denied:
            self.counters.permission_errors += 1
            if self.calls.deny(denied, self.denials.publish_error):
                self.denials.told(denied)
            log.warning("bus_denied", subject=denied)

    async def _on_disconnected(self) -> None:
        if not self._closing:
            log.warning("bus_disconnected", nats=self.settings.nats)

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        self._refused = False
        self.denials.forget()
        self._reconnected.set()  # first: the log may be a broken pipe
        log.info("bus_reconnected", nats=self.settings.nats)

    async def _on_closed(self) -> None:
        if not self._closing:
            log.error("bus_closed", nats=self.settings.nats, error=self.last_error)

    async def _on_lame_duck(self) -> None:
        await self._client.force_reconnect()

    def _options(self) -> dict[str, Any]:
        given = self.settings
        options: dict[str, Any] = {
            "servers": [url.strip() for url in given.nats.split(",")],
            "name": self.name,
            "inbox_prefix": f"_INBOX_{self.name}",
            "error_cb": harmless(self._on_error),
            "disconnected_cb": harmless(self._on_disconnected),
            "reconnected_cb": harmless(self._on_reconnected),
            "closed_cb": harmless(self._on_closed),
            "lame_duck_mode_cb": self._on_lame_duck,
            "connect_timeout": given.connect_timeout_s,
            "reconnect_time_wait": given.reconnect_wait_s,
            "max_reconnect_attempts": -1,
            "ping_interval": given.ping_interval_s,
            "max_outstanding_pings": OUTSTANDING_PINGS_MAX,
            "pending_size": given.pending_size_bytes,
            "flush_timeout": FLUSH_TIMEOUT_S,
            "drain_timeout": DRAIN_TIMEOUT_S,
        }
        if given.nkey_seed_file:
            options["nkeys_seed"] = given.nkey_seed_file
            read_seed(Path(given.nkey_seed_file))
        if given.creds_file:
            options["user_credentials"] = given.creds_file
        if given.tls_ca:
            options["tls"] = _tls(given)
        return options

    def _unreachable(self, error: Exception | None) -> str:
        why = self.last_error or (str(error) if error is not None and str(error) else "no answer")
        if self._refused or REFUSED in why.lower():
            return self._unknown()
        return (
            f"no connection to NATS at {self.settings.nats} ({why}): start nats-server -js there, "
            "or name another with --nats URL or KVBUS_NATS"
        )

    def _unknown(self) -> str:
        given = self.settings.nkey_seed_file or self.settings.creds_file or "no key"
        return (
            f"NATS at {self.settings.nats} refuses us ({given}): authorization violation. Give KVBUS_NKEY_SEED_FILE a "
            "seed of kvbus auth init, and let nats-server read the nats-auth.conf that was made with it"
        )


def _tls(settings: BusSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.tls_ca)
    if settings.tls_cert:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    return context
