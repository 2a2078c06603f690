"""How a model is read, split, quantised and computed on one machine, and how its files are given to others."""
