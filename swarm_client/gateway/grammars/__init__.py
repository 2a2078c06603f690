"""Grammars that answers must follow, and the check of those that come from strangers."""
