"""Virtual time for the production shells: while a run is on, their `time` and `log` are the world's."""

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import kvbus.engine.own_matcher
import kvbus.engine.rank
import kvbus.engine.scheduler
import kvbus.reuse.service  # noqa: F401  (these bring in the others)
from kvbus.sim.world import World


def _shells() -> list[tuple[ModuleType, str]]:
    """Every module of the engine that reads the clock or logs, and under which name."""
    modules = [
        module for name, module in sorted(sys.modules.items()) if name.startswith(("kvbus.engine.", "kvbus.reuse."))
    ]
    names = {"time": time, "monotonic": time.monotonic, "secrets": secrets}
    clocks = [(m, name) for m in modules for name, real in names.items() if getattr(m, name, None) is real]
    return clocks + [(m, "log") for m in modules if hasattr(getattr(m, "log", None), "warning")]


_SHELLS = _shells()
_FATAL = ("unknown_request_received", "unknown_request_sent", "preemption_waited_too_long")
"""What a shell catches that vLLM would die of, or corrupt memory by: a fault of ours all the same."""


class VirtualTime:
    """The part of `time` that the shells use."""

    def __init__(self, world: World) -> None:
        self.monotonic = world.local_s

    def sleep(self, seconds: float) -> None:
        return


class SeededSecrets:
    """The part of `secrets` that the shells use."""

    def __init__(self, world: World) -> None:
        self._rng = world.rng

    def token_hex(self, count: int) -> str:
        return self._rng.randbytes(count).hex()


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
    before = [(shell, name, getattr(shell, name)) for shell, name in _SHELLS]
    ours = {
        "time": VirtualTime(world),
        "monotonic": world.local_s,
        "secrets": SeededSecrets(world),
        "log": StoryLog(world),
    }
    for shell, name in _SHELLS:
        setattr(shell, name, ours[name])
    try:
        yield
    finally:
        for shell, name, value in before:
            setattr(shell, name, value)
