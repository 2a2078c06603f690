"""Continuous batching on the client: all generations of a process go through one loop."""
