"""Parameters that a client trains in remote blocks: LoRA, prompts, their snapshots for the wire; a callback for TRL."""
