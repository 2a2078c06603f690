"""The evaluations of a run in stages on held-out data, as one peer of a stage takes part in them."""
