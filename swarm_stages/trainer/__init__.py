"""Takes micro-batches through all stages until every stage has all of them."""
