"""What comes in: bytes to messages, dead letters, and handlers that may fail without stopping anything."""

import functools
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from nats.aio.msg import Msg

from kvbus.bus.client import ORIGIN
from kvbus.bus.link import Link
from kvbus.errors import BusError
from kvbus_schemas import MESSAGE_BYTES_MAX, AnyMessage, DeadLetter, UndecodableError, decode, subjects

DEAD_LETTERS_PER_S_MAX = 100
"""Beyond it dead letters are counted and not reported."""
REASON_CHARS_MAX = 300

log = structlog.get_logger(__name__)

Handler = Callable[[AnyMessage], Awaitable[None] | None]
Rejected = Callable[[str, str], None]

COPY_HEADER = ORIGIN
"""On what JetStream has read out of a stream. It sends that wherever it is asked to, so on any subject."""


class Inbound:
    """The receiving half of a Bus."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._name = name
        self._second = 0
        self._reported = 0

    async def decoded(self, msg: Msg, rejected: Rejected | None = None) -> AnyMessage | None:
        """The message, or None after a dead letter. `rejected` is called with its subject and what is wrong."""
        self._link.counters.received += 1
        try:
            if len(msg.data) > MESSAGE_BYTES_MAX:
                raise UndecodableError(f"{len(msg.data)} bytes are over the limit of {MESSAGE_BYTES_MAX}")  # noqa: TRY301
            if COPY_HEADER in (msg.headers or {}):
                raise UndecodableError("a copy out of a stream, which somebody has sent here")  # noqa: TRY301
            message = decode(msg.data)
            check_subject(msg.subject, message)
        except UndecodableError as error:
            if rejected is not None:
                rejected(msg.subject, str(error))
            await self._dead_letter(msg, str(error))
            return None
        return message

    async def handle(self, handler: Handler, message: AnyMessage) -> None:
        """Call `handler`; what it raises is logged and counted."""
        try:
            result = handler(message)
            if result is not None:
                await result
        except Exception as error:
            self.failed(message, error)

    def failed(self, message: AnyMessage, error: Exception) -> None:
        """Count and log what a handler raised."""
        self._link.counters.handler_errors += 1
        log.error("handler_failed", kind=type(message).__name__, key=message.key, error=repr(error), exc_info=error)

    async def _dead_letter(self, msg: Msg, reason: str) -> None:
        self._link.counters.dead_letters += 1
        if not self._may_report():
            return
        log.warning("dead_letter", subject=msg.subject, reason=reason[:REASON_CHARS_MAX])
        letter = DeadLetter(
            source=self._name, subject=msg.subject, reason=reason[:REASON_CHARS_MAX], size_bytes=len(msg.data)
        )
        try:
            await self._link.publish(subjects.dead_letters_of(self._name), msgspec.msgpack.encode(letter))
        except BusError as error:
            log.warning("dead_letter_unreported", error=str(error))

    def _may_report(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._reported = second, 0
        self._reported += 1
        return self._reported <= DEAD_LETTERS_PER_S_MAX


def check_subject(subject: str, message: AnyMessage) -> None:
    """NATS permissions pin the sender and the kind of message in the subject; the message may say nothing else.
    Raises UndecodableError."""
    *root, plane, event, sender, _, key = subject.split(".") if subject.count(".") >= _DOTS_MIN else [""] * _DOTS_MIN
    if message.source not in ("", sender):
        raise UndecodableError(f"{sender} speaks as {message.source}")
    kind = type(message)
    if (".".join(root), plane, event, key) != (subjects.ROOT, kind.PLANE, _event_of(kind), message.key):
        raise UndecodableError(f"a {kind.__name__} about {message.key} has no place on {subject}")


_DOTS_MIN = 6
_event_of = functools.cache(subjects.event_of)
