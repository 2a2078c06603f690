"""The capabilities of a model, as far as its tokenizer says."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from swarm_gateway.answers.reasoning import reasoning_format_of
from swarm_gateway.answers.tools import call_regions


def capabilities_of(tokenizer: PreTrainedTokenizerBase, *, sees: bool) -> list[str]:
    """Return the model's capabilities, by the names that Ollama's API has for them; ``sees``: it takes pictures."""
    found = ["completion", "embedding"]
    if call_regions(tokenizer):
        found.append("tools")
    if reasoning_format_of(str(tokenizer.chat_template or "")) is not None:
        found.append("thinking")
    if sees:
        found.append("vision")
    return found
