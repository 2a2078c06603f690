"""Drafts distilled from the model itself: a few blocks between its own embedding and head. Import ``draft``."""
