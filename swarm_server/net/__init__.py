"""Messages as they come and go: validation, reassembly, pushes to the next server, distances."""
