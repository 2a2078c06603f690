"""Streams of libp2p: opening and serving them, framing of messages, copying of bytes, and limits."""
