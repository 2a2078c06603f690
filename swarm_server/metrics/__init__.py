"""Metrics of a server for Prometheus. Import ``exporter``, which needs prometheus_client."""
