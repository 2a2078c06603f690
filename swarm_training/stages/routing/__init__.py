"""Pure decisions: which peer a trainer asks, what a step lacks, which trainer computes it, and when stages step."""
