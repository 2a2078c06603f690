"""Servers are checked: some of what they answer is computed again elsewhere, and who answered wrongly is left out."""
