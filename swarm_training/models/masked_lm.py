"""ALBERT, whose layers share their parameters: a language model with little to average (Lan et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AlbertConfig, AlbertForMaskedLM


@dataclass(frozen=True)
class MaskedLMConfig:
    """The sizes of a masked language model. ``num_groups``: the number of parameter sets that the layers share;
    ``embedding_size``: the size of a token's embedding before its projection.

    The defaults are those of a model that a laptop trains; ALBERT-large has 24 layers of 1024 with 16 heads.
    """

    vocab_size: int
    max_length: int = 128
    embedding_size: int = 64
    hidden_size: int = 256
    num_heads: int = 4
    num_layers: int = 6
    num_groups: int = 1


def masked_lm(config: MaskedLMConfig) -> AlbertForMaskedLM:
    """Return a new model without dropout; ``model(input_ids=…, labels=…).loss`` ignores labels of −100."""
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_length,
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_attention_heads=config.num_heads,
            num_hidden_layers=config.num_layers,
            num_hidden_groups=config.num_groups,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
