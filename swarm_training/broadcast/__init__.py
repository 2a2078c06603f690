"""Signed statements that reach all honest peers, and what they agree on to have heard in a phase."""
