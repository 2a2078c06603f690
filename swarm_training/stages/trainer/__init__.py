"""The trainer: it takes micro-batches through all stages until every stage has all of them."""
