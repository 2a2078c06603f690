"""Decides, without a socket or a clock, how a chain is put right whose servers fail; import from its modules."""
