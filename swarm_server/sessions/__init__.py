"""Sessions on a server: admission, the order of their steps, copies to other servers."""
