"""Traces and metrics for OpenTelemetry, which is imported only where the standard ``OTEL_…`` variables ask for it."""
