"""The history of a swarm and the work of its servers, kept in SQLite."""
