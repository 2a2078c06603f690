"""What has happened in a swarm and what its servers have computed, kept in SQLite."""
