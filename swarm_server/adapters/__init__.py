"""Adapters on a server: the store, and low-rank products added to blocks."""
