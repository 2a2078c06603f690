"""What a server counts, for people at its terminal, and for Prometheus. ``exporter`` needs prometheus_client."""
