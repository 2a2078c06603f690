"""Sums whose bits are the same on every machine."""
