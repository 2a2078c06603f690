"""One peer's part in a run: it accumulates gradients, averages with others, steps, and sends its state to joiners."""
