"""Every command of ``swarm``: parsers, the chat in the terminal, the doctor, the demo, fine-tuning, and keys."""
