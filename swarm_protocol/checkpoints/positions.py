"""How many positions a model has, and whether they depend on one another."""

from __future__ import annotations

from transformers import PreTrainedConfig


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence the model was made for; None if it has no limit (alibi, or the config names none)."""
    if getattr(config, "alibi", False):
        return None
    for name in ("max_position_embeddings", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def rope_depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether rotary embeddings are chosen by the longest position of a batch (dynamic NTK, LongRoPE).

    Such a model must see a prompt in one piece and sessions one by one to compute what it does alone.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return any(entry.get("rope_type", entry.get("type")) in ("dynamic", "longrope") for entry in [parameters, *nested])
