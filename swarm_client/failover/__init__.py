"""How a chain is put right whose servers fail: what was sent to it, and decisions without a socket or a clock."""
