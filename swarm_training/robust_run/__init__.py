"""A run in which some peers may cheat: BTARD over the network, step by step."""
