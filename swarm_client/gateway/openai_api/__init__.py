"""OpenAI's endpoints: what may be asked for, the generations that answer it, and the shapes of answers."""
