"""A step of a stack of blocks as a list of instructions, which the kernel runs in one call."""
