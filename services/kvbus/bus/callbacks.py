"""Callbacks that nats-py awaits in its own reader: what they raise would end the connection's life for good."""

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

P = ParamSpec("P")


def harmless(callback: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """`callback`, which may find its log closed or broken (stderr of a daemon, a pipe whose reader has gone)."""

    @functools.wraps(callback)
    async def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await callback(*args, **kwargs)
        except (OSError, ValueError):  # ValueError: I/O operation on closed file. There is nowhere to say it
            return

    return call
