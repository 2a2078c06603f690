"""What a client knows of the swarm: servers, how far and how healthy they are, and connections to them."""
