"""The connection to one server; no other package uses gRPC. Import ``transport``, ``hops`` and ``wire_tensor``."""
