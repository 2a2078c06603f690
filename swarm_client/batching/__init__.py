"""Continuous batching on the client: one loop computes all generations of a model."""
