"""The losses of a run by step, as numbers and as a picture."""
