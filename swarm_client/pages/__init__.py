"""The pages that ``swarm serve`` has for browsers: files, and no build step."""
