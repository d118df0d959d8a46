"""The port behind which bytes move: vLLM's NIXL data plane, or a light engine's."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from kvbus.engine.pushes import Write
from kvbus_schemas import EngineCard

log = structlog.get_logger()

ABORT_AGAIN_S = 0.01
"""Pause of the rank's thread before it tries again to break off a WRITE."""


class DataPlane(Protocol):
    """What moves the bytes. All calls come from the rank's thread."""

    def connect(self, card: EngineCard, done: Callable[[str], None]) -> None:
        """Shake hands, in the background; `done` gets an error text, or "" when it worked."""
        ...

    def connected(self, engine_id: str, incarnation: str) -> bool: ...

    def disconnect(self, engine_id: str, incarnation: str) -> None: ...

    def submit(self, write: Write, ready: Any) -> list[int]:
        """Post the WRITE to every rank that it concerns; returns its handles. Raises when nothing was posted."""
        ...

    def poll(self, handles: list[int]) -> str:
        """`pending`, `done` or `failed`; drops finished handles from the list."""
        ...

    def abort(self, handles: list[int]) -> bool:
        """Stop a WRITE for good; False when that cannot be done yet."""
        ...

    def notes(self) -> list[bytes]: ...


def state_of(plane: DataPlane, handles: list[int]) -> str:
    """As `poll`. A WRITE that cannot be asked after (NIXL forgets those to a peer that it has forgotten) is broken off;
    others must not wait for it."""
    try:
        return plane.poll(handles)
    except Exception as error:
        log.warning("write_state_unknown", error=repr(error))
        if plane.abort(handles):
            return "failed"
        time.sleep(ABORT_AGAIN_S)
        return "pending"
