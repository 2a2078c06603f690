"""The gateway of ``swarm serve``: models of a swarm behind the HTTP API of OpenAI."""
