"""From counted values to Prometheus' text, over one HTTP process or several.

With ``PROMETHEUS_MULTIPROC_DIR`` set before `prometheus_client` is imported, values live in files
of that folder, one set for each process, and any process answers for all: counters add up, also
those of processes that have ended, and what the engine reports counts once, however many have heard
of it. An engine's totals begin at 0 with every start; they are kept apart by start (label ``boot``)
and added up here, so that none ever goes backwards or stands still.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from invar.observe.catalogue import FOLDER_VARIABLE, METRICS, Kind

BOOT = "boot"

# Times of creation double the series and tell nothing that process_start_time_seconds does not.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Exposition(Collector):
    """What is scraped: values of all processes, totals of all boots, second names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._folder = os.environ.get(FOLDER_VARIABLE)
        self._source: Collector | CollectorRegistry = registry
        if self._folder is not None:
            # Facts about one process say little where another answers the next scrape.
            self._source = MultiProcessCollector(None, self._folder)  # type: ignore[no-untyped-call]
        else:
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=registry)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._totals = {spec.name for spec in METRICS if spec.kind is Kind.ENGINE_TOTAL}
        self._aliases = {spec.name: spec.alias for spec in METRICS if spec.alias is not None}

    def render(self) -> bytes:
        """Prometheus text format 0.0.4. Takes milliseconds; not for the event loop."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            if metric.name in self._totals:
                metric = over_boots(metric)
            yield metric
            alias = self._aliases.get(metric.name)
            if alias is not None:
                yield renamed(metric, alias)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would collect at once to learn the names."""
        return []


def over_boots(metric: Metric) -> Metric:
    """Totals of every start of the engine, added up, as the counter that they are."""
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in metric.samples:
        labels = tuple((name, text) for name, text in sample.labels.items() if name != BOOT)
        sums[labels] = sums.get(labels, 0.0) + sample.value
    counter = Metric(metric.name, metric.documentation, "counter")
    for labels, value in sums.items():
        counter.add_sample(f"{metric.name}_total", dict(labels), value)
    return counter


def renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, f"Alias of {metric.name}.", metric.type)
    copy.samples = [
        sample._replace(name=sample.name.replace(metric.name, name, 1)) for sample in metric.samples
    ]
    return copy
