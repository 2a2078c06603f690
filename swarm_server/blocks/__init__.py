"""Loads blocks, quantised or not, and runs them."""
