"""Generated from protos/swarm.proto by `make proto`."""
