"""Sharing of a checkpoint's files between members: their manifest, their storage, and their download."""
