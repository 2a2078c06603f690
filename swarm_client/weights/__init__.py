"""Where a client takes its part of a model from: this machine, the hub, or members of the swarm."""
