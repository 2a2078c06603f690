"""Batches as functions of (run, step, index), so that any peer can recompute them, and streams that can resume."""
