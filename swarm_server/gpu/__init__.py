"""Decoding on GPUs: attention where keys and values lie, steps as one graph, and copies to and from them."""
