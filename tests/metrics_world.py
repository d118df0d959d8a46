"""Prometheus's text, read again, and what the dashboard asks for."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "compose" / "grafana" / "dashboards" / "kvbus.json"
ALERTS = ROOT / "compose" / "prometheus" / "alerts.yml"

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By name, as on the page: labels and value."""


def samples_of(text: str) -> Samples:
    """Every sample of a page; of a family without samples the names that they would have."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for name in names_of(family.name, family.type):
            found.setdefault(name, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def names_of(name: str, kind: str) -> tuple[str, ...]:
    """The names of a family's samples."""
    if kind == "histogram":
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
    return (f"{name}_total",) if kind == "counter" else (name,)


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the samples of that name that have these labels."""
    return sum(value for own, value in samples.get(name, ()) if labels.items() <= own.items())


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without its headings."""
    document = json.loads(DASHBOARD.read_text())
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """(panel, PromQL) of every query, with Grafana's interval filled in."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")


def named_in(expression: str) -> set[str]:
    """The metrics of ours and of vLLM that a query names."""
    return set(re.findall(r"\b(?:kvbus_[a-z_]+|vllm:[a-z_]+)\b", expression))
