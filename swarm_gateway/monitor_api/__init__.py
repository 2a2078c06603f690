"""The API under ``/api/v1``: a swarm's state, history and events as flat JSON."""
