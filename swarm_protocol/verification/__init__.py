"""Whether an answer is the model's: comparison of two answers, signed statements, and evidence that one is false."""
