"""The standard variables of OpenTelemetry: which exporters they ask for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

Signal = Literal["traces", "metrics"]
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}  # the exporter by protocol
_INTERVAL_MS = 60_000.0
_logger = logging.getLogger(__name__)


def exporters(signal: Signal, environment: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters for this signal, as their packages call them; none if nothing is asked for.

    The specification's default is ``otlp`` to this machine. Here an endpoint or an exporter must be named, so that
    nothing is exported without a variable. The protocol is ``http/protobuf`` unless one is named.
    """
    name = signal.upper()
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    endpoints = "OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT"
    default = "otlp" if any(environment.get(each) for each in endpoints) else "none"
    asked = [each.strip() for each in (environment.get(f"OTEL_{name}_EXPORTER") or default).split(",")]
    protocols = f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = next((given for each in protocols if (given := environment.get(each))), "http/protobuf")
    otlp = _OTLP.get(protocol, f"otlp by {protocol}")
    return [otlp if each == "otlp" else each for each in asked if each not in ("", "none")]


def export_interval_s(environment: Mapping[str, str]) -> float:
    """Return the time between two exports of metrics."""
    given = environment.get("OTEL_METRIC_EXPORT_INTERVAL")
    try:
        interval_ms = float(given) if given else _INTERVAL_MS
    except ValueError:
        interval_ms = 0.0
    if not 0 < interval_ms < float("inf"):
        _logger.warning("OTEL_METRIC_EXPORT_INTERVAL is %s: expected milliseconds above 0, 60000 is used", given)
        interval_ms = _INTERVAL_MS
    return interval_ms / 1e3
