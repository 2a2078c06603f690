"""The console script ``swarm``: one command for servers and clients, which know nothing of each other."""
