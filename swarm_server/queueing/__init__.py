"""Queueing: the order in which work of one kind gets its turn."""
