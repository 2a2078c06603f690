"""A run among cheaters: BTARD over the network, step by step."""
