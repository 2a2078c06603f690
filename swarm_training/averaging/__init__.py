"""One averaging round: which member adds up which chunk, and how stragglers and failed members are handled."""
