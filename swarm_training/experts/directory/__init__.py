"""The registry of experts: signed records in the DHT, found by prefix, and the client's cache of them."""
