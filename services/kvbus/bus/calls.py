"""Requests and their answers over one inbox. A denied request fails at once instead of timing out."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from kvbus.bus.errors import NoRespondersError, RequestTimeoutError
from kvbus.errors import BusError

CALLS_MAX = 4096
NO_RESPONDERS = "503"

Send = Callable[[str, bytes, str, dict[str, str] | None], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Call:
    subject: str
    answer: "asyncio.Future[Msg]"
    parts: list[Msg] = field(default_factory=list)
    many: bool = False


def status_of(msg: Msg) -> str:
    """The NATS status of a message (`204`, `404`, ...), empty for an ordinary one."""
    return str(msg.headers.get("Status", "")) if msg.headers else ""


class Calls:
    """The open requests of one connection. `inbox` ends in a dot; each request adds its own token."""

    def __init__(self, inbox: str, send: Send) -> None:
        self.inbox = inbox
        self._send = send
        self._open: dict[str, _Call] = {}
        self._tokens = itertools.count(1)

    async def one(self, subject: str, data: bytes, *, timeout_s: float, headers: dict[str, str] | None = None) -> Msg:
        """The first answer. Raises NoRespondersError, RequestTimeoutError, or BusError when sending is denied."""
        call = self._new(subject, many=False)
        return await self._ask(call, data, timeout_s, headers)

    async def many(self, subject: str, data: bytes, *, timeout_s: float) -> tuple[list[Msg], Msg]:
        """All answers up to, and apart from, the one that carries a status."""
        call = self._new(subject, many=True)
        end = await self._ask(call, data, timeout_s, None)
        return call.parts, end

    async def arrived(self, msg: Msg) -> None:
        """Callback of the inbox's subscription."""
        call = self._open.get(msg.subject.rpartition(".")[2])
        if call is None or call.answer.done():
            return
        if call.many and not status_of(msg):
            call.parts.append(msg)
        else:
            call.answer.set_result(msg)

    def deny(self, subject: str, error_for: Callable[[str], BusError]) -> bool:
        """Fail every open request on `subject` (in lower case) with `error_for` its subject; False if none is."""
        found = False
        for call in self._open.values():
            if call.subject.lower() == subject and not call.answer.done():
                call.answer.set_exception(error_for(call.subject))
                found = True
        return found

    def _new(self, subject: str, *, many: bool) -> _Call:
        if len(self._open) >= CALLS_MAX:
            raise BusError(f"{CALLS_MAX} requests are open already: slow down")
        return _Call(subject, asyncio.get_running_loop().create_future(), many=many)

    async def _ask(self, call: _Call, data: bytes, timeout_s: float, headers: dict[str, str] | None) -> Msg:
        token = str(next(self._tokens))
        self._open[token] = call
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(call.subject, data, self.inbox + token, headers)
                msg = await call.answer
        except TimeoutError:
            raise RequestTimeoutError(f"no answer on {call.subject} within {timeout_s} s") from None
        finally:
            del self._open[token]
            call.answer.cancel()
        if status_of(msg) == NO_RESPONDERS:
            raise NoRespondersError(f"nobody listens on {call.subject}")
        return msg
