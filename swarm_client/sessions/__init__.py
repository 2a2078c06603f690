"""A generation with keys and values on servers, and its failover. Import ``session``."""
