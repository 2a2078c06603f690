"""The Swarm server, which serves contiguous transformer blocks of a Hugging Face model to a swarm."""
