"""The parts that all endpoints use: HTTP errors, the served models, the servers of an answer, metrics, and pictures."""
