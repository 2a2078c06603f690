"""The statements that peers sign for other peers to check: contributions to a run, and orders of moderators."""
