"""The basis of all other packages: the config, the events for users, and the network's thread."""
