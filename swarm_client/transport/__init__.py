"""Speaks to one server; above this room nobody knows of gRPC. Import ``transport``, ``hops`` and ``wire_tensor``."""
