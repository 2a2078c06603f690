"""Training in stages by real processes, which are killed, stopped and cut off."""
