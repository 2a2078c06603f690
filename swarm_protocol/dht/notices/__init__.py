"""What stands in the DHT beside the records of servers: revoked memberships, and servers that answer wrongly."""
