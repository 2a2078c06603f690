"""The capabilities of a model, as far as its tokenizer says."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from swarm_gateway.answers.reasoning import may_reason
from swarm_gateway.answers.tools import call_regions


def capabilities_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the model's capabilities, by the names that Ollama's API has for them."""
    found = ["completion", "embedding"]
    if call_regions(tokenizer):
        found.append("tools")
    if may_reason(tokenizer):
        found.append("thinking")
    return found
