"""Blocks: loading them, quantised or not, and running them."""
