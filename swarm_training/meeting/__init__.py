"""How peers come together at the end of a batch, and decide as one whether its average counts."""
