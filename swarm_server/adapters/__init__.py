"""Adapters on a server: their store, and the low-rank products that they add to blocks."""
