"""The choice of the blocks that a server should host. The functions are pure: a view in, moves out."""
