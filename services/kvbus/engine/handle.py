"""A hold on the engine's own loop: sleep until there is something to do, and wake it.

vLLM's loop polls while it has requests that wait for KV: each turn costs both processes of the engine. Inside a turn
that schedules nothing, a hook may instead sleep on the condition of the engine's input queue, which a new request
or an abort notifies anyway, and which we notify when the bus has something.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any


class EngineHandle:
    """Found from inside the scheduler's constructor; without an engine core around it, sleeps on its own condition."""

    def __init__(self, wakeup: Any = None) -> None:
        self._core = _engine_core()
        self._own: queue.Queue[Any] = queue.Queue()
        self._wakeup = wakeup
        self._news = False

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, or None outside an engine core."""
        return getattr(self._core, "scheduler", None)

    def wait(self, seconds: float, ready: Callable[[], bool]) -> None:
        """Sleep until a request comes in, `notify` is called, `ready` is true, or `seconds` have passed."""
        inbox = self._inbox()
        with inbox.not_empty:
            inbox.not_empty.wait_for(lambda: inbox.queue or self._news or ready(), timeout=seconds)
            self._news = False

    def notify(self) -> None:
        """End a `wait`. From any thread."""
        inbox = self._inbox()
        with inbox.not_empty:
            self._news = True
            inbox.not_empty.notify_all()

    def wake_idle(self) -> None:
        """Make an engine that has no requests take a step (so that a hook can free what it holds)."""
        if self._wakeup is not None and self._core is not None and hasattr(self._core, "input_queue"):
            self._core.input_queue.put_nowait((self._wakeup, None))

    def _inbox(self) -> "queue.Queue[Any]":
        return getattr(self._core, "input_queue", None) or self._own


def _engine_core() -> Any:
    """The object whose constructor builds the scheduler that builds the connector: vLLM's engine core."""
    frame = sys._getframe(1)  # noqa: SLF001  (vLLM hands connectors no reference to the engine)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(base.__name__ == "EngineCore" for base in type(owner).__mro__):
            return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def unpin_threads() -> None:
    """Let every thread of this process run on every core: vLLM pins a CPU worker's main thread to the last one."""
    cores = range(os.cpu_count() or 1)
    for thread in threading.enumerate():
        if thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, cores)
