"""How many positions a model has."""

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
