"""The shared types of training: the configs, the record of a peer, moments, and the interfaces to the network."""
