"""Who is there: records of servers in the DHT, and the registry of this machine."""
