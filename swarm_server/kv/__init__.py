"""Keys, values and recurrent states: where they are, how much room there is, equal prompts, transfer."""
