"""What enters a span of blocks, on both sides of the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockInput:
    """Hidden states and what attention needs to know about their positions.

    hidden: [batch, tokens, hidden_size]; attention_mask: [batch, past + tokens] or None; position_ids: [batch or 1,
    tokens] or None.
    """

    hidden: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
