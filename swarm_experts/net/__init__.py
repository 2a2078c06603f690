"""Speaks gRPC: the service of a server that has experts, and calls of it."""
