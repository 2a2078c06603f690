"""OpenAI's endpoints: the requests, the generations that answer them, and the shapes of answers."""
