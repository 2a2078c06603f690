"""Decides purely whom a trainer asks, what is still to be computed in a step, and which trainer computes it."""
