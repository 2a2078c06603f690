"""OpenAI's batches: files of requests that are answered when nobody else waits, and go on after a restart."""
