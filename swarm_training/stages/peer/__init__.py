"""The life of a stage peer: it counts micro-batches, averages with its stage, and steps when all stages do."""
