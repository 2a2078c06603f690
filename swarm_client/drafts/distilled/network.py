"""The network of a distilled draft: a few blocks between the model's own embedding and head, which a client has anyway.

Beside each token it sees the hidden state that the model predicted this token from (EAGLE, Li et al., 2024, section 4),
where that is known; for what it has guessed itself, its own output takes that place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import Cache, LlamaConfig, LlamaModel

from swarm_protocol.checkpoints.family import cache_argument_of


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft, and those of the model that it must fit.

    Attributes:
        vocab_size: of the model, whose head makes tokens of what the draft computes.
        model_hidden_size: width of the model's hidden states.
        hidden_size: width of the draft's own.
        context: how many tokens it has been trained to look back on.
    """

    vocab_size: int
    model_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    context: int


class DraftNetwork(nn.Module):
    """Blocks of a Llama, with random weights at first."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        config = LlamaConfig(
            vocab_size=1,  # embedding and head are the model's
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_blocks,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
        )
        self.token_norm = nn.RMSNorm(shape.model_hidden_size, eps=1e-6)
        self.feature_norm = nn.RMSNorm(shape.model_hidden_size, eps=1e-6)
        self.join = nn.Linear(2 * shape.model_hidden_size, shape.hidden_size, bias=False)
        self.body = LlamaModel(config)
        del self.body.embed_tokens
        self._cache_argument = cache_argument_of(self.body.forward) or "past_key_values"
        same = shape.hidden_size == shape.model_hidden_size
        self.out = nn.Identity() if same else nn.Linear(shape.hidden_size, shape.model_hidden_size, bias=False)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        cache: Cache | None = None,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the model's head turns into logits of the token after each, [rows, tokens, model_hidden_size].

        Args:
            embedded: the tokens, by the model's embedding, in the same shape.
            features: the hidden state from which the model predicted each of them, in the same shape; zeros where it is
                not known.
            cache: keys and values of the tokens before.
            mask: what each token attends to, [rows or 1, 1, tokens, cached and new tokens] of booleans; by default all
                tokens before.
            positions: of the tokens, [rows or 1, tokens]; by default those after what is cached.
        """
        joined = self.join(torch.cat([self.token_norm(embedded), self.feature_norm(features)], -1))
        hidden = self.body(
            inputs_embeds=joined,
            attention_mask=mask,
            position_ids=positions,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        ).last_hidden_state
        states: torch.Tensor = self.out(hidden)
        return states
