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

from invar.observe.catalogue import FOLDER_VARIABLE, METRICS, SUM, Kind

BOOT = "boot"
OF_BOOTS = (Kind.ENGINE_TOTAL, Kind.ENGINE_HISTOGRAM)
Labels = tuple[tuple[str, str], ...]

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
        self._of_boots = {spec.name: spec.kind for spec in METRICS if spec.kind in OF_BOOTS}
        self._aliases = {spec.name: spec.alias for spec in METRICS if spec.alias is not None}

    def render(self) -> bytes:
        """Prometheus text format 0.0.4. Takes milliseconds; not for the event loop."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            kind = self._of_boots.get(metric.name)
            if kind is not None:
                metric = over_boots(metric, kind)
            yield metric
            alias = self._aliases.get(metric.name)
            if alias is not None:
                yield renamed(metric, alias)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would collect at once to learn the names."""
        return []


def over_boots(metric: Metric, kind: Kind) -> Metric:
    """Totals of every start of the engine, added up, as the counter or histogram that they are."""
    sums: dict[Labels, float] = {}
    for sample in metric.samples:
        labels = tuple((name, text) for name, text in sample.labels.items() if name != BOOT)
        sums[labels] = sums.get(labels, 0.0) + sample.value
    added = Metric(metric.name, metric.documentation, kind.prometheus)
    if kind is Kind.ENGINE_HISTOGRAM:
        add_histogram(added, sums)
        return added
    for labels, value in sums.items():
        added.add_sample(f"{metric.name}_total", dict(labels), value)
    return added


def add_histogram(metric: Metric, counts: dict[Labels, float]) -> None:
    """The samples of a histogram, from counts of single buckets and the sum of all."""
    sums = {labels: value for labels, value in counts.items() if ("le", SUM) in labels}
    buckets = [(labels, value) for labels, value in counts.items() if labels not in sums]
    below: dict[Labels, float] = {}
    for labels, value in sorted(buckets, key=lambda bucket: float(dict(bucket[0])["le"])):
        of_series = without_bound(labels)
        below[of_series] = below.get(of_series, 0.0) + value
        metric.add_sample(f"{metric.name}_bucket", dict(labels), below[of_series])
    for labels, value in sums.items():
        of_series = without_bound(labels)
        metric.add_sample(f"{metric.name}_count", dict(of_series), below[of_series])
        metric.add_sample(f"{metric.name}_sum", dict(of_series), value)


def without_bound(labels: Labels) -> Labels:
    return tuple(pair for pair in labels if pair[0] != "le")


def renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, f"Alias of {metric.name}.", metric.type)
    copy.samples = [
        sample._replace(name=sample.name.replace(metric.name, name, 1)) for sample in metric.samples
    ]
    return copy
