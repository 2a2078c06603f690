"""The web pages of ``swarm serve``: static files without a build step."""
