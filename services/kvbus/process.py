"""What every kvbus process does the same way: its log, its event loop, its name, its end."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TextIO, cast

import structlog

from kvbus.errors import ConfigError
from kvbus_schemas import subjects

NAME_ENV = "KVBUS_NAME"
LOG_LEVEL_ENV = "KVBUS_LOG_LEVEL"
INCARNATION_BYTES = 6
NAME_SUFFIX_BYTES = 3
ABORTED = 130

log = structlog.get_logger(__name__)

Main = Callable[[asyncio.Event], Awaitable[None]]


def new_incarnation() -> str:
    """12 hexadecimal digits, new at every call."""
    return secrets.token_hex(INCARNATION_BYTES)


def process_name(kind: str) -> str:
    """A name for this process on the bus: KVBUS_NAME, which permissions may pin, or one such as `router-7f3a9c`.
    Raises ConfigError on a KVBUS_NAME that cannot stand in a subject."""
    given = os.environ.get(NAME_ENV)
    if given:
        try:
            return subjects.token(given)
        except subjects.SubjectTokenError as error:
            raise ConfigError(f"{NAME_ENV}: {error}") from None
    return f"{kind}-{secrets.token_hex(NAME_SUFFIX_BYTES)}"


class LastingStream:
    """A stream for a log that outlives it: what cannot be written (it is closed, its reader has gone) is dropped, so
    that nobody fails for having said something."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure_logging(level: str | None = None) -> None:
    """Log events to stderr: readable on a terminal, one JSON object a line elsewhere.

    `level` (debug, info, warning, error) defaults to KVBUS_LOG_LEVEL, then to info.
    """
    name = (level or os.environ.get(LOG_LEVEL_ENV) or "info").upper()
    threshold = logging.getLevelNamesMapping().get(name, logging.INFO)
    on_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if on_terminal else "iso", utc=not on_terminal),
    ]
    if on_terminal:
        rendering: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=shared + rendering,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LastingStream(sys.stderr))),
        cache_logger_on_first_use=False,
    )


def run(main: Main) -> None:
    """Run `main(stopping)` to its end, on uvloop where it is installed.

    The first SIGTERM or SIGINT sets `stopping`, upon which main drains and returns; the second aborts the process.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_stopped(main))


async def _until_stopped(main: Main) -> None:
    stopping = asyncio.Event()
    with _signals_set(stopping):
        await main(stopping)


@contextlib.contextmanager
def _signals_set(stopping: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            log.warning("aborted", signal=number.name)
            os._exit(ABORTED)
        stopping.set()  # first: the log may be a broken pipe
        log.info("stopping", signal=number.name)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
