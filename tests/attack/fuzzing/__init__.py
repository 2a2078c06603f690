"""A seeded fuzzer that knows the structure of what it changes: calls, records in the DHT, and files."""
