"""Signed statements that reach all honest peers, and the agreement on the statements of a phase."""
