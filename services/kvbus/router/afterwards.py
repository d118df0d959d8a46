"""What is left to do for a request once its client has been served: RequestServed, metrics, one line in the log.

None of it is urgent, and done at once it would stand in the way of the next request. So it is done DELAY_S later, for
all requests of that time: they share a write to NATS and one to the log.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from kvbus.router.answer import Result
from kvbus.router.core import Dispatch
from kvbus.router.metrics import Metrics
from kvbus_schemas import Post

DELAY_S = 0.005

_encode = msgspec.json.Encoder().encode
Publish = Callable[[Iterable[Post]], Awaitable[None]]


class Served(msgspec.Struct, frozen=True):
    """One request that has been served."""

    request_id: str
    body_bytes: int
    dispatch: Dispatch | None
    result: Result


class Afterwards:
    """`add` what has been served; `work` may be called whenever there is time."""

    def __init__(self, metrics: Metrics, publish: Publish) -> None:
        self._metrics = metrics
        self._publish = publish
        self._pending: list[Served] = []
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._lines = _Lines()
        self._log = _logger(self._lines)

    def add(self, served: Served) -> None:
        """Keep it for later."""
        self._pending.append(served)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._late)

    async def work(self) -> None:
        """Do all of it now."""
        pending = self._pending
        if not pending:
            return
        self._pending = []
        posts: list[Post] = []
        for served in pending:
            posts += self._last_word(served)
            self._count(served)
            self._log.info("request_served", **_line(served))
        await self._publish(posts)

    async def close(self) -> None:
        """Do the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._work_and_flush()

    def _late(self) -> None:
        """The timer has gone off: what is added from now on gets another one."""
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._work_and_flush())

    async def _work_and_flush(self) -> None:
        try:
            await self.work()
        finally:
            self._lines.flush_all()

    def _count(self, served: Served) -> None:
        result = served.result
        mode = served.dispatch.mode if served.dispatch else "none"
        self._metrics.count_request(mode, result.status, result.ttft_s, result.duration_s)
        self._metrics.reused(result.reuse)

    def _last_word(self, served: Served) -> tuple[Post, ...]:
        if served.dispatch is None:
            return ()
        result = served.result
        return served.dispatch.served(
            result.outcome,
            result.status,
            ttft_ms=round(result.ttft_s * 1000.0, 3),
            duration_ms=round(result.duration_s * 1000.0, 3),
            error=result.error,
        )


def _line(served: Served) -> dict[str, Any]:
    """The canonical line: which engines, how long, what came of it; nothing of what was asked or answered."""
    dispatch, result = served.dispatch, served.result
    line = {
        "request_id": served.request_id,
        "status": result.status,
        "outcome": result.outcome,
        "ttft_ms": round(result.ttft_s * 1000.0, 3),
        "duration_ms": round(result.duration_s * 1000.0, 3),
        "body_bytes": served.body_bytes,
    }
    if dispatch is not None:
        line |= {
            "transfer_id": dispatch.transfer_id,
            "mode": dispatch.mode,
            "attempt": dispatch.attempt,
            "prefill_id": dispatch.prefill.engine_id if dispatch.prefill else "",
            "decode_id": dispatch.decode.engine_id if dispatch.decode else "",
            "conversation": dispatch.facts.conversation,
            "reuse": result.reuse,
        }
    if result.error:
        line["error"] = result.error
    return line


class _Lines:
    """A file for structlog that writes a batch at a time."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []

    def write(self, line: bytes) -> int:
        self._kept.append(line)
        return len(line)

    def flush(self) -> None:
        """structlog flushes after each line; that is what this file is there to avoid."""

    def flush_all(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            with contextlib.suppress(OSError, ValueError):  # nobody reads the log any more: no reason to serve nobody
                sys.stderr.write(b"".join(kept).decode())
                sys.stderr.flush()


def _logger(lines: _Lines) -> Any:
    """Like `process.configure_logging` sets it up, but bound once and rendered in one go where a machine reads it."""
    if sys.stderr.isatty():
        return structlog.get_logger(__name__)
    logger = structlog.wrap_logger(
        structlog.BytesLogger(lines),  # type: ignore[arg-type]
        processors=[_render],
        wrapper_class=structlog.get_config()["wrapper_class"],
    )
    return logger.bind()


def _render(_logger: Any, method: str, event: structlog.typing.EventDict) -> bytes:
    event["level"] = method
    event["timestamp"] = datetime.now(UTC)
    return _encode(event)
