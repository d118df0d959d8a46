"""The light engine's numbers for Prometheus: vLLM's under vLLM's names, and kvbus's own."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvbus.light.engine import LightEngine
from kvbus.metrics import catalogue
from kvbus.metrics.page import registry_of as page_of
from kvbus.metrics.tally import Distribution, Reading

CONTENT_TYPE = CONTENT_TYPE_LATEST
LABELS = ["model_name", "engine"]


class _Collector:
    def __init__(self, engine: LightEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        """Called by the server: reads counts, changes nothing."""
        load, total = self._engine.load(), self._engine.settings.blocks
        counters = self._engine.scheduler.counters
        labels = [self._engine.identity.model, "0"]
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", load.running),
            ("num_requests_waiting", "Requests queued or parked for KV.", load.waiting),
            ("kv_cache_usage_perc", "Share of the blocks that somebody holds.", 1 - load.free_blocks / total),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Tokens of all prompts.", counters.prompt_tokens),
            ("generation_tokens", "Tokens of all answers.", counters.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens that were looked up.", counters.cache_queries),
            ("prefix_cache_hits", "Prompt tokens that needed no computing.", counters.cache_hits),
            ("num_preemptions", "Requests that lost their blocks.", counters.preemptions),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(labels, value)
            yield counter


def registry_of(engine: LightEngine) -> CollectorRegistry:
    """A registry of the engine's own."""

    def own() -> Iterator[Reading | Distribution]:
        engine.look()
        yield from _summed(engine)

    labels = dict(zip(LABELS, (engine.identity.model, "0"), strict=True))
    registry: CollectorRegistry = page_of(own, (*catalogue.BUS, *catalogue.ENGINE), labels)
    registry.register(_Collector(engine))
    return registry


def _summed(engine: LightEngine) -> Iterator[Reading | Distribution]:
    """Scheduler and rank together: what both count is added, the rest is one's alone."""
    tallies = (engine.counting.tally, engine.rank_counting.tally)
    sums: dict[tuple[str, tuple[str, ...]], Reading] = {}
    for tally in tallies:
        for one in tally.readings():
            before = sums.get((one.metric.name, one.labels))
            sums[one.metric.name, one.labels] = one._replace(value=one.value + before.value) if before else one
        yield from tally.histograms()
    yield from sums.values()


def metrics_text(registry: CollectorRegistry) -> bytes:
    """The page."""
    return generate_latest(registry)
