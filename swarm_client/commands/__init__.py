"""The client's commands: their flags, and what each does with them."""
