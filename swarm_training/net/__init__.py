"""Speaks gRPC: the service of a peer, and its calls of others."""
