"""The console script ``swarm``: one command for servers and clients, which do not import each other."""
