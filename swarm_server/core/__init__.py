"""The config, which every other room may import."""
