"""Sums whose bits are the same on every machine, and a mean that outliers move only little."""
