"""Training in stages by real processes, which are killed and stopped."""
