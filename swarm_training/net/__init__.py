"""The gRPC part of a peer: its service, and its calls to other peers."""
