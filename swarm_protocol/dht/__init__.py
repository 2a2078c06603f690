"""Peer discovery: records of servers in the DHT, and the registry of this machine."""
