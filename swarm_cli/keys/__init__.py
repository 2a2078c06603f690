"""The command `keys` for the organiser of a private swarm."""
