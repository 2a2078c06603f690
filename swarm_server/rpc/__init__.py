"""Answers gRPC calls. Import ``service``."""
