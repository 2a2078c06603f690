"""What a client trains inside remote blocks: LoRA, prompts, their snapshots for the wire; and a callback for TRL."""
