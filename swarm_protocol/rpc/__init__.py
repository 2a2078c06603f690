"""gRPC as all packages use it: a service that knows its callers, channels that stay open, errors as ours."""
