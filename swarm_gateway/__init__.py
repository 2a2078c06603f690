"""The HTTP side of a swarm: an OpenAI-compatible API, a chat page, a monitor, and the history that it shows."""
