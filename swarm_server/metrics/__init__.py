"""What Prometheus reads of a server. Import ``exporter``; it asks for prometheus_client."""
