"""Spans that OpenTelemetry records. Importing this module needs ``opentelemetry``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Span as RecordedSpan
from opentelemetry.trace import SpanKind, StatusCode, Tracer, get_current_span, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from swarm_protocol.telemetry.tracing import NO_ATTRIBUTES, UNRECORDED, Attributes, Headers, TraceSpan, Tracing

_HEADER = "traceparent"
_propagator = TraceContextTextMapPropagator()


class RecordedTracing(Tracing):
    """A tracing whose spans an OpenTelemetry tracer records.

    Only ``traceparent`` goes to other processes, which may be strangers': it has random numbers, where ``tracestate``
    and ``baggage`` may say anything.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def span(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> Iterator[TraceSpan]:
        with _current(self._tracer.start_span(name, attributes=attributes)) as span:
            yield span

    def begin(self, name: str) -> TraceSpan:
        return self._tracer.start_span(name)

    @contextmanager
    def call(self, name: str, attributes: Attributes, headers: Iterable[tuple[str, Any]]) -> Iterator[TraceSpan]:
        context = _propagator.extract({key: value for key, value in headers if key == _HEADER})
        if not get_current_span(context).get_span_context().is_valid:
            yield UNRECORDED
            return
        with _current(self._tracer.start_span(name, context, SpanKind.SERVER, attributes)) as span:
            yield span

    def event(self, name: str, attributes: Attributes) -> None:
        if (span := get_current_span()).is_recording():
            span.add_event(name, attributes)

    def headers(self) -> Headers:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier)
        return [(_HEADER, carrier[_HEADER])] if _HEADER in carrier else ()


@contextmanager
def _current(span: RecordedSpan) -> Iterator[RecordedSpan]:
    """Make the span the current one, and end it. The span gets the type of an error, but no message with user text."""
    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except Exception as error:  # raised again: a span notes the type of any error
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
