"""The generations that answer requests, whatever API they came by: fields, prompts, and the pieces of answers."""
