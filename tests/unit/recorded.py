"""Telemetry that stays in memory, for tests of what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not there: pip install 'swarm-lm[otel]'")
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from swarm_protocol.telemetry.exporting import Telemetry

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"  # the example of W3C Trace Context


class KeptMetrics(MetricExporter):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[MetricsData] = []

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_options: Any) -> MetricExportResult:
        self.kept.append(metrics_data)
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 0, **_options: Any) -> None:
        pass

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True


class Recorded:
    """Telemetry, and what it has recorded."""

    def __init__(self) -> None:
        self._spans, self.metrics = InMemorySpanExporter(), KeptMetrics()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.telemetry = Telemetry(Resource.create(), provider, [self.metrics])

    @property
    def spans(self) -> list[ReadableSpan]:
        """All that have ended, by their beginning."""
        return sorted(self._spans.get_finished_spans(), key=lambda span: span.start_time)

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@contextmanager
def recorded() -> Iterator[Recorded]:
    found = Recorded()
    with closing(found.telemetry):
        yield found


def trace_id(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


def parent_id(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def span_id(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"
