"""Aggregation that withstands cheating peers, and the protocol that finds and bans them."""
