"""What every other room may import: the config, events that users hear of, and the network's thread."""
