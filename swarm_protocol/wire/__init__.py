"""Data that peers exchange: tensors, adapters, inputs of blocks, and the constants that both sides share."""
