"""Generated from protos/experts.proto by `make proto`."""
