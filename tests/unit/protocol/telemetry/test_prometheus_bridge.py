"""What is counted for Prometheus is the same in OpenTelemetry."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from tests.unit.recorded import KeptMetrics  # skips this module where OpenTelemetry is not there
from tests.unit.support import run, until

from opentelemetry.sdk.resources import Resource  # isort: skip
from swarm_protocol.telemetry.prometheus_bridge import MetricExport, metrics_data  # isort: skip


def exported(registry: CollectorRegistry) -> dict[str, Any]:
    (resource,) = metrics_data(registry.collect(), Resource.create(), 5, 7).resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def test_counters_and_gauges() -> None:
    registry = CollectorRegistry()
    requests = Counter("swarm_requests", "Requests.", ["status"], registry=registry)
    requests.labels("200").inc(3)
    requests.labels("404").inc()
    Gauge("swarm_room_bytes", "Room.", registry=registry).set(2.5)
    found = exported(registry)
    counter, gauge = found["swarm_requests"], found["swarm_room_bytes"]
    assert (counter.description, counter.unit, gauge.unit) == ("Requests.", "1", "By")
    assert counter.data.is_monotonic and counter.data.aggregation_temporality.name == "CUMULATIVE"
    assert [(point.attributes, point.value) for point in counter.data.data_points] == [
        ({"status": "200"}, 3.0),
        ({"status": "404"}, 1.0),
    ]
    (point,) = gauge.data.data_points
    assert (point.value, point.start_time_unix_nano, point.time_unix_nano) == (2.5, 5, 7)


def test_buckets_have_what_lies_between_their_bounds() -> None:
    registry = CollectorRegistry()
    waits = Histogram("swarm_wait_seconds", "Waits.", ["kind"], buckets=(0.1, 1, 10), registry=registry)
    for value in (0.05, 0.1, 0.5, 20.0, 30.0):
        waits.labels("decode").observe(value)
    waits.labels("prefill").observe(2.0)
    metric = exported(registry)["swarm_wait_seconds"]
    decode, prefill = metric.data.data_points
    assert metric.unit == "s"
    assert (decode.attributes, decode.explicit_bounds) == ({"kind": "decode"}, [0.1, 1.0, 10.0])
    assert decode.bucket_counts == [2, 1, 0, 2] and decode.count == 5 and abs(decode.sum - 50.65) < 1e-9
    assert (prefill.attributes, prefill.bucket_counts, prefill.sum) == ({"kind": "prefill"}, [0, 0, 1, 0], 2.0)


class _Failing(Collector):
    def collect(self) -> Any:
        raise TimeoutError

    def describe(self) -> Any:
        return []


def test_a_state_that_cannot_be_read_does_not_end_the_exports(caplog: pytest.LogCaptureFixture) -> None:
    registry, kept, failing = CollectorRegistry(), KeptMetrics(), _Failing()
    export = MetricExport(kept, Resource.create(), registry, interval_s=1e-3)
    registry.register(failing)
    run(until(lambda: "metrics were not exported: TimeoutError" in caplog.text))
    registry.unregister(failing)
    Gauge("late", "Late.", registry=registry).set(4)
    export.close()
    (scope,) = kept.kept[-1].resource_metrics[0].scope_metrics
    assert [metric.name for metric in scope.metrics] == ["late"]
