"""Decoding on GPUs: attention on keys and values in place, steps as one graph, and copies to and from GPUs."""
