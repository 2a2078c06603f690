"""Anthropic's Messages API: its requests become OpenAI's, and the answers get Anthropic's shapes."""
