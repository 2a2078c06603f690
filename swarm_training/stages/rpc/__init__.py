"""Micro-batches over gRPC: the service of a stage peer, and its client in trainers."""
