"""Byte tunnels to servers that cannot be reached directly: over libp2p, through members that relay."""
