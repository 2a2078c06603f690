"""The Trainers of Hugging Face and Lightning drive a training run: each of their steps is a share of its batch."""
