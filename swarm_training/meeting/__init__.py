"""Meetings at the end of a batch, in which peers decide together whether its average counts."""
