"""The gRPC methods of the ``Blocks`` service. Import ``service``."""
