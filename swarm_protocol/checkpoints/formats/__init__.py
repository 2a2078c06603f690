"""How published checkpoints pack their weights, one module for each format: ``known.py`` finds the one of a config."""
