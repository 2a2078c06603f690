"""Observes a swarm without using it: ``status`` and the data that it shows."""
