"""Answers of a stage's peers, computed again by their mates: who has computed wrongly is found and excluded."""
