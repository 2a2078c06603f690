"""What travels between peers: tensors, adapters, what goes into a block, and the constants both sides share."""
