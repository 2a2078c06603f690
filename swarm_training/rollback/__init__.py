"""The rollbacks of a run: when it goes back to a checkpoint, to which one, and what a peer needs for that."""
