"""Sessions on a server: admission, the order of their steps, and copies on other servers."""
