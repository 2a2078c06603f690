"""Computes one stage of a model: its blocks, forward and backward, and the sums of its gradients; no network."""
