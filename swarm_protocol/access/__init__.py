"""Who may take part in a private swarm: tokens that its organiser has signed, and who checks them."""
