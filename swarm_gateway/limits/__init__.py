"""Limits of the gateway: API keys, how much may be asked for at once, and in what order."""
