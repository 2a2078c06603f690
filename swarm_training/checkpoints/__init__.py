"""The checkpoints that a run writes every k steps, to a directory or to the hub."""
