"""The command ``swarm doctor``: it finds problems that keep this machine from using or joining a swarm."""
