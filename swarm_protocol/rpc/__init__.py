"""gRPC for all packages: authenticated services, persistent channels, and errors as this library's exceptions."""
