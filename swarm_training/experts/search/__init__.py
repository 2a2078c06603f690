"""Pure decisions: the experts of a row, the next batch, the cells of a server, and the keepers of replicas."""
