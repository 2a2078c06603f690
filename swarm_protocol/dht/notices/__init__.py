"""DHT entries beside server records: revoked memberships, and accusations against servers that answer wrongly."""
