"""A server's speed and other metrics, for the swarm, people at its terminal, and Prometheus.

``exporter`` needs prometheus_client.
"""
