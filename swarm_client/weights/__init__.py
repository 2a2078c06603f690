"""The sources of a client's part of a model: this machine, the hub, or members of the swarm."""
