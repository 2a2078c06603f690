"""What a process sends where the variables say, to a receiver that reads OTLP; and that it goes on without."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, Counter

import tests.unit.recorded  # noqa: F401  # skips this module where OpenTelemetry is not there
from swarm_protocol.telemetry.exporting import start
from swarm_protocol.telemetry.tracing import tracing

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest  # isort: skip
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # isort: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


class Receiver(ThreadingHTTPServer):
    """A receiver of OTLP by HTTP, which keeps the bodies by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, list[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.setdefault(self.path, []).append(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield receiver
        receiver.shutdown()
        thread.join()


def test_spans_and_metrics_arrive(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    registry = CollectorRegistry()
    Counter("swarm_requests", "Requests.", registry=registry).inc(3)
    telemetry = start("swarm-server")
    telemetry.export(registry)
    with tracing().span("work", {"swarm.blocks": "0:4"}):
        pass
    telemetry.close()
    (body,) = receiver.bodies["/v1/traces"]
    (spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = spans.scope_spans[0].spans
    assert span.name == "work" and [(each.key, each.value.string_value) for each in span.attributes] == [
        ("swarm.blocks", "0:4")
    ]
    (body,) = receiver.bodies["/v1/metrics"]
    (metrics,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    (metric,) = metrics.scope_metrics[0].metrics
    assert metric.name == "swarm_requests" and metric.sum.data_points[0].as_double == 3.0
    for resource in (spans.resource, metrics.resource):
        described = {each.key: each.value.string_value for each in resource.attributes}
        assert described["service.name"] == "swarm-server" and described["service.instance.id"]
        assert described["deployment.environment.name"] == "test"


def test_variables_name_the_service(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/traces")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ada")
    telemetry = start("swarm-server")
    assert not telemetry.exports_metrics
    tracing().begin("work").end()
    telemetry.close()
    assert list(receiver.bodies) == ["/traces"]
    (spans,) = ExportTraceServiceRequest.FromString(receiver.bodies["/traces"][0]).resource_spans
    assert "ada" in [each.value.string_value for each in spans.resource.attributes if each.key == "service.name"]


def test_without_variables_nothing_is_imported() -> None:
    code = (
        "import sys\n"
        "from swarm_protocol.telemetry.exporting import start\n"
        "start('swarm-server').close()\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={}).returncode == 0


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        telemetry = start("swarm-server")
    (record,) = caplog.records
    assert "pip install 'swarm-lm[otel]'" in record.getMessage() and record.exc_info is None
    assert telemetry.tracer_provider is None and not tracing().headers()


def test_an_exporter_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    with caplog.at_level(logging.WARNING):
        start("swarm-server").close()
    (record,) = caplog.records
    expected = "no metrics are exported by otlp by smoke: no installed package has this exporter"
    assert record.getMessage() == expected
