"""The command ``swarm chat``: a conversation in the terminal."""
