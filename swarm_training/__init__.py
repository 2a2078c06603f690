"""Volunteers train one model together."""
