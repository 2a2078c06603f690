"""Decoding on GPUs: attention where keys and values lie, and steps that are launched as one graph."""
