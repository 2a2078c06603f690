"""The computation of one stage of a model: its blocks, forward and backward, and its gradient sums; no network."""
