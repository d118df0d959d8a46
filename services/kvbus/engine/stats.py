"""What an engine counts, on vLLM's own way to its /metrics page: from ranks and scheduler to the API server.

The scheduler's process and the ranks' are not the one that serves HTTP. vLLM carries a connector's statistics from
every step's output to the API server, which keeps the metrics. So they come with a step: `Reporter` has an idle engine
take one now and then.
"""

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbus.metrics import catalogue
from kvbus.metrics.tally import Change, Tally, named, together

REPORT_EVERY_S = 5.0
"""An engine without requests reports so often; one that has some does at every step."""
METRICS = (*catalogue.BUS, *catalogue.ENGINE)


class KvbusStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not type-checked here
    """Changes of one or several processes of an engine."""

    data: Change

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "KVConnectorStats") -> "KvbusStats":
        return KvbusStats(data=together(self.data, other.data))

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log prints of the last interval."""
        counters = self.data.get("counters", {})
        shown = ("kvbus_engine_transfers", "kvbus_engine_written_bytes", "kvbus_engine_reuse_taken_tokens")
        return {".".join(part): value for key, value in counters.items() if (part := _path(key))[0] in shown}


def _path(key: str) -> tuple[str, ...]:
    name, labels = named(key)
    return name, *labels


class Reporter:
    """Hands out what one process has counted."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._taken_s = time.monotonic()

    def take(self) -> KvbusStats | None:
        """For the step that is ending; None when nothing is new."""
        self._taken_s = time.monotonic()
        change = self._tally.take()
        return KvbusStats(data=change) if change else None

    def overdue(self) -> bool:
        """Whether it is time to take a step only for this."""
        return time.monotonic() - self._taken_s >= REPORT_EVERY_S


class KvbusPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not type-checked here
    """The metrics themselves, in the API server."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._made = {metric.name: self._make(metric) for metric in METRICS}
        for metric in METRICS:
            if not metric.labels:  # from the start, so that the first event is an increase
                for values in self.per_engine_labelvalues.values():
                    self._made[metric.name].labels(*values)

    def observe(self, transfer_stats_data: Change, engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for kind, part in transfer_stats_data.items():
            for key, value in part.items():
                name, labels = named(key)
                child = self._made[name].labels(*values, *labels)
                if kind == "counters":
                    child.inc(value)
                elif kind == "gauges":
                    child.set(value)
                else:
                    for one in value:
                        child.observe(one)

    def _make(self, metric: catalogue.Metric) -> Any:
        common: dict[str, Any] = {
            "name": metric.name,
            "documentation": metric.text,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        if metric.kind == "counter":
            return self._counter_cls(**common)
        if metric.kind == "gauge":
            return self._gauge_cls(**common, multiprocess_mode="mostrecent")
        return self._histogram_cls(**common, buckets=metric.buckets)
