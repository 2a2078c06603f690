"""Keys, values and recurrent states: their places in memory, their budget, reuse of equal prompts, transfer."""
