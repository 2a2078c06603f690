"""Byte tunnels over libp2p, through relay members, to servers that cannot be reached directly."""
