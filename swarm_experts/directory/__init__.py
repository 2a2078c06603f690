"""Who has which experts: signed records in the DHT, found by prefix, and what a client remembers of them."""
