"""Parameters that a client trains in remote blocks: LoRA and prompts, their snapshots for the wire, and for TRL."""
