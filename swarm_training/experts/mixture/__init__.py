"""The layer in the user's model: the gate, and the calls to experts."""
