"""The gRPC part of a peer: its way into a run, its service, and its calls to other peers."""
