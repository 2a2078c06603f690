"""The network of a distilled draft: a few blocks between the model's own embedding and head, which every client has.

For each token, the network also sees the hidden state from which the model predicted it, if that state is known (EAGLE,
Li et al., 2024, section 4). For its own guesses, the network uses its own output instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import Cache, LlamaConfig, LlamaModel

from swarm_models.checkpoints.family import cache_argument_of


@dataclass(frozen=True)
class DraftShape:
    """The sizes of a draft, and of the model that it must fit.

    Attributes:
        vocab_size: the vocabulary of the model, whose head turns the draft's output into tokens.
        model_hidden_size: the width of the model's hidden states.
        hidden_size: the width of the draft's own hidden states.
        context: the number of earlier tokens that the draft was trained to use.
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
    """A network of Llama blocks, whose weights are random at first."""

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
        """Return the head's input for the token after each token, [rows, tokens, model_hidden_size].

        Args:
            embedded: the tokens' embeddings by the model, in the same shape.
            features: the hidden state from which the model predicted each token, in the same shape; zeros where this
                state is unknown.
            mask: the tokens that each token attends to, booleans [rows or 1, 1, tokens, cached and new tokens]; by
                default all earlier tokens.
            positions: the tokens' positions, [rows or 1, tokens]; by default the positions after the cached tokens.
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
