"""Replicas of experts' states: kept for other servers, sent to them, and loaded by a server that adopts an expert."""
