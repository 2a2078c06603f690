"""Generated from protos/training.proto by `make proto`."""
