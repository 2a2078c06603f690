"""The command ``swarm up``: a server, a gateway and a browser at once."""
