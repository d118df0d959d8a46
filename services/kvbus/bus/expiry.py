"""When the keys of a watched bucket end, by our own monotonic clock."""

import math
import re
import time
from collections.abc import Callable, Mapping

LOOK_AGAIN_S = 0.25
"""The server removes what has expired up to so much late."""

_DURATION = re.compile(r"(\d+)(ms|h|m|s|)")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0, "ms": 0.001}


def lifetime_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Nats-TTL header (`480`, `1h`, `1500ms`); None when there is no lifetime in it."""
    parts = _DURATION.findall(headers.get("Nats-TTL", ""))
    return sum(int(number) * _UNIT_S[unit] for number, unit in parts) if parts else None


class Expiry:
    """The end of each key. The server's clock is read once, when a session begins; from then on only ours counts, so
    that neither clock's being set changes what is alive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}
        self._ahead_s = 0.0

    def set_clock(self, server_unix_s: float) -> None:
        """The server's time now."""
        self._ahead_s = server_unix_s - self._clock()

    def keep(self, key: str, ttl_s: float, *, stored_unix_s: float) -> None:
        """`key` was stored then, by the server's clock, for so long."""
        now_s = self._clock()
        age_s = max(0.0, now_s + self._ahead_s - stored_unix_s)
        self._ends[key] = now_s + ttl_s - min(age_s, ttl_s)

    def forget(self, key: str) -> None:
        """It is gone."""
        self._ends.pop(key, None)

    def next_s(self) -> float:
        """When the next key ends, by our clock; infinity when none does."""
        return min(self._ends.values(), default=math.inf)

    def due(self, now_s: float) -> list[str]:
        """Keys that should have ended by now. They are due once more in LOOK_AGAIN_S."""
        found = [key for key, end_s in self._ends.items() if end_s <= now_s]
        self._ends |= dict.fromkeys(found, now_s + LOOK_AGAIN_S)
        return found
