"""Deferred imports of torch, transformers and hivemind: parts that a server never uses are not loaded."""
