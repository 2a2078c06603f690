"""Generated from protos/stages.proto by `make proto`."""
