"""The failover of a chain whose servers fail: its journal of inputs, and decisions without a socket or a clock."""
