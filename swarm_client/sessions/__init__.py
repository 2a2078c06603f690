"""One generation's session: its KV cache on servers and its failover. Import ``session``."""
