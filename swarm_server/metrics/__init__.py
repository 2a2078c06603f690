"""A server's metrics, for people at its terminal and for Prometheus. ``exporter`` needs prometheus_client."""
