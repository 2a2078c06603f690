"""Which blocks a server should host. Pure: a view in, moves out."""
