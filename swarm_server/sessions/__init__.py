"""Sessions on a server: the order of their steps, copies on other servers, and time outside the cache."""
