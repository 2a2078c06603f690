"""Drafts: prompt lookup, small models, and the choice among them by name."""
