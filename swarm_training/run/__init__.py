"""The run itself: accumulates, takes part in meetings, steps, and gives its state to those who join."""
