"""The gRPC service of a server of experts, and the calls to it."""
