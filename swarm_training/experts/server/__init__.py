"""A server of experts: it computes, trains, batches, announces, saves and adopts experts."""
