"""Messages from and to other peers: validation, reassembly, pushes to the next server, network measurements."""
