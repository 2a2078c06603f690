"""Looks at a swarm without using it: ``status`` and what it shows."""
