"""The client's commands, with their flags."""
