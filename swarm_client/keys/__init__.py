"""The command `keys`: what the organiser of a private swarm does."""
