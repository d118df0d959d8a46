"""What the client sees: the decode engine's answer with the router's headers, passed on as it comes."""

import time
from typing import Literal

import msgspec

from kvbus.router.core import Dispatch
from kvbus.router.http import Exchange, LegError, Reply, Request
from kvbus.router.identity import Identity, answer_headers
from kvbus.router.problems import RouterProblem, error_event

BAD_REQUEST = 400
HEAD = b"HEAD"
ABORTED = b'"finish_reason":"abort"'
GIVEN_UP = "gave the request up, as an engine does that is being stopped"


def given_up(part: bytes) -> bool:
    """Whether vLLM says here that it has aborted the request, as it does when it is stopped, with status 200: what
    there is of the answer is no answer. (Inside a text the quotes would have backslashes.)"""
    return ABORTED in part


class Result(msgspec.Struct):
    """How it went, for metrics and the log."""

    outcome: Literal["completed", "failed", "cancelled"] = "failed"
    status: int = 500
    error: str = ""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    reuse: str = "miss reason=disabled"
    """As X-Kvbus-Reuse says."""


class Answer:
    """The reply to one request, and what came of it."""

    def __init__(self, request: Request, reply: Reply, identity: Identity) -> None:
        self.result = Result()
        self._request = request
        self._reply = reply
        self._identity = identity
        self._exchange: Exchange | None = None

    @property
    def complete(self) -> bool:
        """True once the client has its whole answer, as far as there is one."""
        return self._reply.ended

    def whole(self, dispatch: Dispatch, exchange: Exchange, body: bytes) -> None:
        """An answer that has been read already."""
        self._begin(exchange)
        self._reply.whole(exchange.status, self._headers(dispatch, exchange), body)
        self._done(exchange.status)

    async def pass_on(self, dispatch: Dispatch, exchange: Exchange) -> None:
        """An answer as it comes, byte by byte. Raises LegError when it breaks off, ConnectionError when the client
        has gone."""
        first = await exchange.first_bytes()
        if exchange.complete and self._request.method != HEAD:
            self.whole(dispatch, exchange, first)
            return
        self._begin(exchange)
        await self._reply.start(exchange.status, self._headers(dispatch, exchange), _length(exchange))
        while part := await exchange.more():
            if given_up(part):
                raise LegError("lost", GIVEN_UP)
            await self._reply.write(part)
        await self._reply.end()
        self._done(exchange.status)

    async def break_off(self, problem: RouterProblem) -> None:
        """The answer has begun and cannot be completed: say so inside the stream, or visibly end it early."""
        self.result.error = problem.message
        if self._exchange is not None and _is_event_stream(self._exchange):
            gap = b"" if self._reply.last.endswith(b"\n\n") else b"\n\n"  # what broke off may be half an event
            await self._reply.end_early(gap + error_event(problem.status, problem.code, problem.message))
        else:
            self._reply.break_off()

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.result.ttft_s = time.monotonic() - self._request.arrived_s
        self.result.status = exchange.status

    def _done(self, status: int) -> None:
        self.result.outcome = "completed" if status < BAD_REQUEST else "failed"

    def _headers(self, dispatch: Dispatch, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        own = [
            (b"x-request-id", self._identity.request_id.encode()),
            (b"x-kvbus-transfer", dispatch.transfer_id.encode()),
            (b"x-kvbus-mode", dispatch.mode.encode()),
            (b"x-kvbus-reuse", self.result.reuse.encode()),
        ]
        return answer_headers(exchange.headers, own)


def _is_event_stream(exchange: Exchange) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in exchange.headers)


def _length(exchange: Exchange) -> int | None:
    for name, value in exchange.headers:
        if name == b"content-length":
            return int(value)
    return None
