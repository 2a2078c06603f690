"""A seeded fuzzer that knows the structure of what peers send: calls, records in the DHT, files of models and adapters."""
