"""The layer in the model of a user: the gate, and what it asks of experts."""
