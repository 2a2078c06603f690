"""OpenAI's endpoints for chats, completions and embeddings, and the shapes of their answers."""
