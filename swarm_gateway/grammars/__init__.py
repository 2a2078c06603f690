"""Grammars that answers must follow, and the check of grammars from strangers."""
