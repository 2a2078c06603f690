"""What every peer of a swarm must agree on: bytes on the wire, records in the DHT, names in a checkpoint."""
