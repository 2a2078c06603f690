"""Speculation: a draft on the client guesses the next tokens, and one pass through the servers verifies them."""
