"""Metrics that are counted for Prometheus, exported to OpenTelemetry too. Importing this needs ``opentelemetry``.

Names stay as they are, so that a collector that writes to Prometheus gives the names that scraping gives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import inf
from threading import Event, Thread
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from swarm_protocol.failures import logged_errors

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Metric as Family

_UNITS = {"seconds": "s", "bytes": "By"}
_logger = logging.getLogger(__name__)


class MetricExport:
    """A thread that exports all of a registry's metrics at a fixed interval. They are totals since the start."""

    def __init__(
        self, exporter: MetricExporter, resource: Resource, registry: CollectorRegistry, interval_s: float
    ) -> None:
        """Start the thread; the first export is after one interval."""
        self._exporter, self._resource, self._registry, self._interval_s = exporter, resource, registry, interval_s
        self._started_ns = time.time_ns()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="metrics to OpenTelemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export a last time, and end the thread."""
        self._closing.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        # A collector may be unable to read the state now, and an exporter is third-party code: the next try may work.
        with logged_errors(_logger, "metrics were not exported", level=logging.WARNING):
            found = metrics_data(self._registry.collect(), self._resource, self._started_ns, time.time_ns())
            self._exporter.export(found)


def metrics_data(families: Iterable[Family], resource: Resource, started_ns: int, now_ns: int) -> MetricsData:
    """Return these metrics in OpenTelemetry's form; ``started_ns`` is when they began to count, both since 1970."""
    scope = InstrumentationScope("swarm")
    metrics = [
        Metric(
            family.name,
            family.documentation,
            _UNITS.get(family.name.rpartition("_")[2], "1"),
            _data(family, started_ns, now_ns),
        )
        for family in families
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _data(family: Family, started_ns: int, now_ns: int) -> Sum | Gauge | Histogram:
    if family.type == "histogram":
        return Histogram(list(_histograms(family, started_ns, now_ns)), AggregationTemporality.CUMULATIVE)
    points = [
        NumberDataPoint(sample.labels, started_ns, now_ns, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")  # the time at which a counter began
    ]
    if family.type == "counter":
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _histograms(family: Family, started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield a data point for each set of labels.

    Prometheus counts all values up to a bound, OpenTelemetry those between two bounds.
    """
    up_to: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels: Mapping[str, str] = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(labels.items())
        if sample.name.endswith("_bucket"):
            up_to.setdefault(key, {})[float(sample.labels["le"])] = sample.value
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    for key, counts in up_to.items():
        bounds = sorted(counts)
        numbers = [0, *(int(counts[bound]) for bound in bounds)]
        yield HistogramDataPoint(
            attributes=dict(key),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=numbers[-1],
            sum=sums.get(key, 0.0),
            bucket_counts=[more - fewer for fewer, more in pairwise(numbers)],
            explicit_bounds=[bound for bound in bounds if bound != inf],
            min=None,  # type: ignore[arg-type]  # optional in the protocol, and not known
            max=None,  # type: ignore[arg-type]
        )
