"""Configuration, access and counters, which every other package of the server may import."""
