"""A causal Transformer whose layers share their parameters, as ALBERT's do (Lan et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

KeysValues = tuple[Tensor, Tensor]  # each [batch, heads, positions, head size]


class Block(nn.Module):
    """A Transformer block of pre-norm causal attention and a perceptron."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, hidden: Tensor, past: KeysValues | None = None) -> tuple[Tensor, KeysValues]:
        """Return the output, keys and values. hidden: [batch, positions, hidden size]; with a past, one position."""
        batch, positions, size = hidden.shape
        heads = self.query_key_value(self.attention_norm(hidden)).view(batch, positions, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).reshape(batch, positions, size))
        return hidden + self.mlp(self.mlp_norm(hidden)), (key, value)


class SharedBlocks(nn.Module):
    """A stack of ``num_layers`` layers with ``num_groups`` blocks: consecutive layers of a group share one block."""

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int, num_groups: int = 1) -> None:
        """Create the blocks. Raise ValueError if groups do not divide the layers, or heads the hidden size."""
        super().__init__()
        if num_groups < 1 or num_layers % num_groups:
            raise ValueError(f"{num_layers} layers cannot share {num_groups} blocks: expected a divisor of the layers")
        if hidden_size % num_heads:
            raise ValueError(f"a hidden size of {hidden_size} cannot be divided among {num_heads} heads")
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_groups))
        self.layers_per_block = num_layers // num_groups

    def forward(self, hidden: Tensor, past: list[KeysValues] | None = None) -> tuple[Tensor, list[KeysValues]]:
        """Return the last layer's output, [batch, positions, hidden size], and every layer's keys and values."""
        kept: list[KeysValues] = []
        for block in self.blocks:
            for _ in range(self.layers_per_block):
                hidden, keys_values = block(hidden, past[len(kept)] if past else None)
                kept.append(keys_values)
        return hidden, kept
