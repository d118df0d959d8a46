"""Virtual time for the production shells: while a run is on, their `time` and `log` are the world's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbus.engine import rank, scheduler
from kvbus.sim.world import World

_SHELLS = (scheduler, rank)
_FATAL = ("unknown_request_received", "unknown_request_sent", "preemption_waited_too_long")
"""What a shell catches that vLLM would die of, or corrupt memory by: a fault of ours all the same."""


class VirtualTime:
    """The part of `time` that the shells use."""

    def __init__(self, world: World) -> None:
        self.monotonic = world.local_s

    def sleep(self, seconds: float) -> None:
        return


class StoryLog:
    """The part of structlog that the shells use: lines of the story."""

    def __init__(self, world: World) -> None:
        self._world = world

    def info(self, event: str, **fields: Any) -> None:
        world = self._world
        if world.tells and world.current is not None:
            world.tell(world.current.name, str(fields.pop("transfer_id", "")), f"{event} {fields or ''}".strip())

    warning = info
    debug = info

    def error(self, event: str, **fields: Any) -> None:
        if event in _FATAL:
            self._world.violate("4", str(fields.get("transfer_id", "")), f"{event} {fields}")
        self.info(event, **fields)

    exception = error


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """The shells live in this world for a while."""
    before = [(shell, name, getattr(shell, name)) for shell in _SHELLS for name in ("time", "log")]
    for shell in _SHELLS:
        setattr(shell, "time", VirtualTime(world))  # noqa: B010  (mypy knows that a module is no place for a class)
        setattr(shell, "log", StoryLog(world))  # noqa: B010
    try:
        yield
    finally:
        for shell, name, value in before:
            setattr(shell, name, value)
