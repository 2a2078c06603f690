"""The parts that all endpoints use: HTTP errors, the models that are served, servers as answers name them, metrics."""
