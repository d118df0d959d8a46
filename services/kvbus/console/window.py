"""What happened in the last seconds, second by second. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

RATE_WINDOW_S = 60
REUSE_WINDOW_S = 600
"""Turns of a conversation are minutes apart."""
TTFTS_PER_S_MAX = 2000
HIT = "hit"


@dataclass(slots=True)
class _Second:
    served: int = 0
    failed: int = 0
    ttfts: list[float] = field(default_factory=list)
    reuse: Counter[str] = field(default_factory=Counter)


class Window:
    """Requests, times to the first byte and answers about reuse. Times are seconds since 1970 on one clock."""

    def __init__(self) -> None:
        self._seconds: dict[int, _Second] = {}

    def served(self, at_s: float, ttft_ms: float, *, failed: bool) -> None:
        """A request has ended; `ttft_ms` is 0 where no byte was sent."""
        second = self._second(at_s)
        second.served += 1
        second.failed += failed
        if ttft_ms and len(second.ttfts) < TTFTS_PER_S_MAX:
            second.ttfts.append(ttft_ms)

    def reuse(self, at_s: float, result: str) -> None:
        """A look-up was answered: HIT, or the reason of the miss."""
        self._second(at_s).reuse[result] += 1

    def totals(self, now_s: float) -> dict[str, Any]:
        """Rates over the last minute, reuse over the last ten; `spark` has one value for each of the last 60 whole
        seconds."""
        now = int(now_s)
        for old in [second for second in self._seconds if second <= now - REUSE_WINDOW_S]:
            del self._seconds[old]
        minute = [self._seconds.get(now - back, _EMPTY) for back in range(RATE_WINDOW_S, 0, -1)]
        ttfts = sorted(ttft for second in minute for ttft in second.ttfts)
        reuse: Counter[str] = Counter()
        for second in self._seconds.values():
            reuse.update(second.reuse)
        asked = reuse.total()
        return {
            "per_s": round(sum(second.served for second in minute) / RATE_WINDOW_S, 2),
            "served": sum(second.served for second in minute),
            "failed": sum(second.failed for second in minute),
            "ttft_p50_ms": quantile(ttfts, 0.50),
            "ttft_p99_ms": quantile(ttfts, 0.99),
            "spark": [second.served for second in minute],
            "spark_ttft": [quantile(sorted(second.ttfts), 0.50) or 0 for second in minute],
            "reuse_asked": asked,
            "reuse_hit_share": round(reuse[HIT] / asked, 4) if asked else None,
            "reuse": sorted(reuse.items(), key=lambda item: (item[0] != HIT, -item[1], item[0])),
        }

    def _second(self, at_s: float) -> _Second:
        return self._seconds.setdefault(int(at_s), _Second())


_EMPTY = _Second()


def quantile(ordered: list[float], share: float) -> float | None:
    """The value below which `share` of `ordered` lies (nearest rank); None of nothing."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
