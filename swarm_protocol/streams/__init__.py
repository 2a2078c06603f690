"""Streams of libp2p: opened and taken, messages and runs of bytes on them, how bytes are copied, and how many."""
