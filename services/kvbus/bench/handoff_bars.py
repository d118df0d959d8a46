"""What kvbus_early must reach against the stock arms, and what it did reach."""

from typing import NamedTuple

from kvbus.bench.report import Arm, Metric

HALF = 0.5
TTFT_SHARE = 0.95
ORDER_MAX_MS = 5.0
MESSAGES_MAX = 12
BYTES_MAX = 8 * 1024
IDLE_MAX = 5.0
WAITING_MAX = 10.0
NONE = Metric(p50=0.0, p99=0.0, n=0)


class Bar(NamedTuple):
    """One sentence of what was asked, with the figures."""

    what: str
    figures: str
    met: bool

    def line(self) -> str:
        return f"{'met' if self.met else 'NOT MET':8} {self.what}: {self.figures}"


def bars_of(arms: list[Arm], keys: list[str], differing: int) -> list[Bar]:
    """All bars that the arms which ran allow to judge. `keys` name the points, for example `600_c8`."""
    by_name = {arm.name: arm.metrics for arm in arms}
    ours = by_name.get("kvbus_early")
    bars = [Bar("answers that differ between arms", str(differing), differing == 0)]
    if ours is None:
        return bars
    push = by_name.get("stock_push")
    stock = [by_name[name] for name in ("stock_push", "stock_pull") if name in by_name]
    for key in keys:
        if push is not None:
            bars += _hand_off(ours, push, key)
        bars.append(_at_most("registration to order, median ms", ours, f"register_to_order_ms_{key}", ORDER_MAX_MS))
        if stock:
            bars.append(_ttft(ours, stock, key))
        bars.append(_at_most("messages on the bus per request", ours, f"bus_messages_{key}", MESSAGES_MAX))
        bars.append(_at_most("bytes on the bus per request", ours, f"bus_bytes_{key}", BYTES_MAX))
    return bars + _cpu(ours)


def _hand_off(ours: dict[str, Metric], push: dict[str, Metric], key: str) -> list[Bar]:
    name = f"finish_to_start_ms_{key}"
    we, they = ours.get(name, NONE), push.get(name, NONE)
    what = f"prefill finished to decode's start at most half of stock push's, {key}"
    return [
        Bar(f"{what}, {label}", f"{a:.4g} against {b:.4g} ms", bool(we.n and they.n) and a <= HALF * b)
        for label, a, b in (("median", we.p50, they.p50), ("p99", we.p99, they.p99))
    ]


def _ttft(ours: dict[str, Metric], stock: list[dict[str, Metric]], key: str) -> Bar:
    name = f"ttft_ms_{key}"
    we = ours.get(name, NONE)
    better = min((metrics[name] for metrics in stock if name in metrics), key=lambda one: one.p50, default=NONE)
    figures = f"{we.p50:.5g} ±{we.spread:.2g} against {better.p50:.5g} ±{better.spread:.2g} ms"
    if key.endswith("_c1"):
        what = f"TTFT at most {TTFT_SHARE} of the better stock arm's, {key}"
        return Bar(what, f"{figures}, {we.p50 / (better.p50 or 1):.3f}", we.p50 <= TTFT_SHARE * better.p50)
    limit = better.p50 + we.spread + better.spread
    return Bar(f"TTFT not above the better stock arm's beyond the spread, {key}", figures, we.p50 <= limit)


def _at_most(what: str, metrics: dict[str, Metric], name: str, limit: float) -> Bar:
    value = metrics.get(name, NONE)
    key = name.rpartition("s_")[2]
    return Bar(f"{what} at most {limit:g}, {key}", f"{value.p50:.4g}", bool(value.n) and value.p50 <= limit)


def _cpu(ours: dict[str, Metric]) -> list[Bar]:
    bars = []
    for name, value in ours.items():
        if name.endswith("_cpu_percent"):
            limit = IDLE_MAX if name.startswith("idle") else WAITING_MAX
            what = name.removesuffix("_cpu_percent").replace("_", " ")
            bars.append(Bar(f"{what}, percent of a core under {limit:g}", f"{value.p50:.3g}", value.p50 < limit))
    return bars
