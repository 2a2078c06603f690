"""OpenAI's Responses API: its requests become chat requests, and responses are kept for the requests that follow."""
