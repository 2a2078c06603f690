"""The life of a stage peer: counts micro-batches, averages with its stage, steps when all stages do."""
