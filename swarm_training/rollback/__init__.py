"""When a run goes back to a checkpoint, to which, and what a peer needs for it."""
