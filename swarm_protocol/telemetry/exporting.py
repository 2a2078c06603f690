"""Telemetry of this process, as the standard ``OTEL_…`` variables say. Trouble with it never stops the process."""

from __future__ import annotations

import logging
import os
import time
from importlib.metadata import entry_points, version
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from swarm_protocol.failures import logged_errors
from swarm_protocol.telemetry.environment import Signal, export_interval_s, exporters
from swarm_protocol.telemetry.tracing import Tracing, use

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from swarm_protocol.telemetry.prometheus_bridge import MetricExport

_FLUSH_S = 5.0  # for the last spans and metrics; a collector that is gone must not hold up the end of the process
_logger = logging.getLogger(__name__)


class Telemetry:
    """The exporters of one process; none unless ``start`` found that variables ask for some. It must be closed.

    Attributes:
        tracer_provider: the maker of tracers; None if no traces are exported.
        exports_metrics: whether ``export`` has an effect.
    """

    def __init__(
        self,
        resource: Resource | None = None,
        tracer_provider: TracerProvider | None = None,
        metric_exporters: list[MetricExporter] | None = None,
    ) -> None:
        """Take the exporters over. The process's spans are recorded from now on if there is a ``tracer_provider``."""
        self.tracer_provider = tracer_provider
        self._resource, self._metric_exporters = resource, metric_exporters or []
        self._exports: list[MetricExport] = []
        if tracer_provider is not None:
            from swarm_protocol.telemetry.recording import RecordedTracing

            use(RecordedTracing(tracer_provider.get_tracer("swarm", version("swarm-lm"))))

    @property
    def exports_metrics(self) -> bool:
        return bool(self._metric_exporters)

    def export(self, registry: CollectorRegistry) -> None:
        """Export what this registry collects, from now on and a last time at ``close``, from threads of their own."""
        for exporter in self._metric_exporters:
            # Here, because it needs OpenTelemetry, which is there if there are exporters.
            from swarm_protocol.telemetry.prometheus_bridge import MetricExport

            assert self._resource is not None, "exporters come with the resource that they describe"
            self._exports.append(MetricExport(exporter, self._resource, registry, export_interval_s(os.environ)))

    def close(self) -> None:
        """Export what is left, for a few seconds at most, and record nothing more."""
        ending = [Thread(target=export.close, daemon=True) for export in self._exports]
        if self.tracer_provider is not None:
            use(Tracing())
            ending.append(Thread(target=self.tracer_provider.shutdown, daemon=True))
        for thread in ending:
            thread.start()
        deadline_s = time.monotonic() + _FLUSH_S
        for thread in ending:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def start(service: str) -> Telemetry:
    """Start what the variables ask for. Log a warning about each part of it that cannot be had.

    ``service`` is the name of the service unless variables name another one.
    """
    traces, metrics = exporters("traces", os.environ), exporters("metrics", os.environ)
    if not (traces or metrics):
        return Telemetry()
    try:
        import prometheus_client  # noqa: F401  # it collects what is exported
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _logger.warning("OTEL_… variables ask for OpenTelemetry, which is not installed: pip install 'swarm-lm[otel]'")
        return Telemetry()
    described = {"service.name": service, "service.version": version("swarm-lm"), "service.instance.id": str(uuid4())}
    resource = Resource.create(described).merge(OTELResourceDetector().detect())  # where both say it, the variables do
    provider = None
    if of_traces := _made("traces", traces):
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # ``Telemetry.close`` does it, in time
        for exporter in of_traces:
            provider.add_span_processor(BatchSpanProcessor(exporter))
    return Telemetry(resource, provider, _made("metrics", metrics))


def _made(signal: Signal, names: list[str]) -> list[Any]:
    """Return the exporters of these names that are installed and understand their variables."""
    made = []
    for name in names:
        found = list(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))
        # An exporter is third-party code, which reads the user's variables.
        with logged_errors(_logger, "no %s are exported by %s", signal, name, level=logging.WARNING):
            if not found:
                raise ValueError("no installed package has this exporter")
            exporter = found[0].load()()
            if not hasattr(exporter, "export"):
                raise ValueError("it reads OpenTelemetry's own metrics, and cannot export these")
            made.append(exporter)
    return made
