"""Queueing: in what order work of one kind has its turn."""
