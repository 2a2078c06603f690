"""``swarm doctor``: looks for what would keep this machine from using or joining a swarm."""
