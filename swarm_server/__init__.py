"""Serves contiguous transformer blocks of a Hugging Face model to a swarm."""
