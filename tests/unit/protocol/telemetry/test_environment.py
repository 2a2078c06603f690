"""Which exporters the standard variables ask for."""

from __future__ import annotations

import logging

import pytest

from swarm_protocol.telemetry.environment import export_interval_s, exporters

HERE = "http://127.0.0.1:4318"


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, [], []),
        ({"OTEL_SERVICE_NAME": "ada", "OTEL_RESOURCE_ATTRIBUTES": "a=b"}, [], []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": HERE}, ["otlp_proto_http"], ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": HERE, "OTEL_SDK_DISABLED": "True"}, [], []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": HERE, "OTEL_METRICS_EXPORTER": "none"}, ["otlp_proto_http"], []),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": HERE}, ["otlp_proto_http"], []),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp_proto_http"], []),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"], []),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, [], ["otlp_proto_grpc"]),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": HERE,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
            },
            ["otlp_proto_grpc"],
            ["otlp_proto_http"],
        ),
    ],
)
def test_exporters(environment: dict[str, str], traces: list[str], metrics: list[str]) -> None:
    assert exporters("traces", environment) == traces
    assert exporters("metrics", environment) == metrics


@pytest.mark.parametrize(("given", "interval_s"), [(None, 60.0), ("", 60.0), ("1500", 1.5)])
def test_the_interval_is_in_milliseconds(given: str | None, interval_s: float) -> None:
    environment = {} if given is None else {"OTEL_METRIC_EXPORT_INTERVAL": given}
    assert export_interval_s(environment) == interval_s


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf"])
def test_an_interval_that_is_none_is_named(given: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert export_interval_s({"OTEL_METRIC_EXPORT_INTERVAL": given}) == 60.0
    assert f"OTEL_METRIC_EXPORT_INTERVAL is {given}: expected milliseconds" in caplog.text
