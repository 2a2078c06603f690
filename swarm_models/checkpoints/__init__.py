"""Reading of Hugging Face checkpoints, and the split of their models into blocks."""
