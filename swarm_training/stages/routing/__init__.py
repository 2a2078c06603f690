"""The pure decisions of a trainer: which peer it asks, what a step still lacks, and which trainer computes it."""
