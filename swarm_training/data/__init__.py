"""Batches as functions of (run, step, index), so that anybody can recompute them; streams that can be resumed."""
