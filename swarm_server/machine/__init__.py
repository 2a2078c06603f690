"""Cores and memory of this machine."""
