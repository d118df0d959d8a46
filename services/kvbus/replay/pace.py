"""How fast a recording is played."""

import time

from kvbus.errors import ConfigError


class Pace:
    """`original`, `max`, or how many times as fast. Call it with the recorded time of each line: how long to wait."""

    def __init__(self, speed: str) -> None:
        self.factor = _factor(speed)
        self._start: tuple[float, float] | None = None

    def wait_s(self, at_s: float) -> float:
        """Seconds until that line is due."""
        if self.factor is None:
            return 0.0
        now_s = time.monotonic()
        start_s, recorded_s = self._start = self._start or (now_s, at_s)
        return max(0.0, start_s + (at_s - recorded_s) / self.factor - now_s)

    def sleep(self, at_s: float) -> None:
        """Wait until that line is due."""
        time.sleep(self.wait_s(at_s))


def _factor(speed: str) -> float | None:
    if speed == "max":
        return None
    try:
        factor = 1.0 if speed == "original" else float(speed)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise ConfigError(f"speed {speed!r} is none: write original, max, or a factor such as 10")
    return factor
