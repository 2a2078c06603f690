"""What peers sign for others to check: who has contributed how much, and what moderators order."""
