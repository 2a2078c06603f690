"""Hugging Face's Trainer drives a training run: each of its steps is a share of the run's batch."""
