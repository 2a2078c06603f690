"""Optimizers for large batches and little memory, bit-identical on all peers."""
