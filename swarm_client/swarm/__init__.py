"""A client's knowledge of the swarm: servers, their round trips and health, and connections to them."""
