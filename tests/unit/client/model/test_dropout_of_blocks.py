"""Which config fields make blocks random in training: told by what the stock model then computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from swarm_client.model.left_out import dropout_of_blocks
from swarm_models.checkpoints.describing import describe
from tests.marks import SLOW
from tests.zoo import make_config

FIELDS = {  # the names that may be dropout, of which some are not in blocks
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop", "summary_first_dropout"),
    "opt": ("dropout", "attention_dropout"),
    "mpt": ("attn_config.attn_pdrop", "resid_pdrop", "emb_pdrop"),
    "falcon-rw": ("attention_dropout", "hidden_dropout"),
    "gpt_neox": ("attention_dropout", "hidden_dropout", "classifier_dropout"),
    "starcoder2": ("attention_dropout", "residual_dropout", "embedding_dropout"),
    "mixtral": ("attention_dropout", "router_jitter_noise"),
    "minimax": ("attention_dropout",),
}
OUTSIDE = {"embd_pdrop", "summary_first_dropout", "emb_pdrop", "embedding_dropout", "classifier_dropout"}


def with_one(name: str, field: str) -> PreTrainedConfig:
    """A config in which this field alone is above 0."""
    config = make_config(name)
    for other in (*FIELDS[name], field):
        *holders, attribute = other.split(".")
        holder = config
        for part in holders:
            holder = getattr(holder, part)
        vars(holder)[attribute] = 0.3 if other == field else 0.0  # typed int in mpt
    return config


def blocks_are_random(config: PreTrainedConfig) -> bool:
    """Whether the stock model's blocks, in training, answer the same hidden states in more than one way."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    family = describe(config)
    owner = family.owner_of(next(module for module in model.modules() if isinstance(module, family.base_class)))
    blocks, seen = getattr(owner, family.blocks), []
    hidden = torch.randn(2, 9, family.hidden_size)
    blocks[0].register_forward_pre_hook(lambda _block, inputs: (hidden, *inputs[1:]))  # whatever embeddings do
    blocks[-1].register_forward_hook(lambda _block, _inputs, output: seen.append(output))
    for seed in (1, 2):
        torch.manual_seed(seed)
        model(torch.ones(2, 9, dtype=torch.long), use_cache=False)
    first, second = (output[0] if isinstance(output, tuple) else output for output in seen)
    return not torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        pytest.param(name, field, marks=() if name in ("gpt2", "mpt", "mixtral") else SLOW)
        for name, fields in FIELDS.items()
        for field in fields
    ],
)
def test_fields_of_blocks(name, field):
    config = with_one(name, field)
    found = dropout_of_blocks(config, describe(config))
    assert found == ({field: 0.3} if blocks_are_random(config) else {})
    assert not found or field not in OUTSIDE


def test_of_configs_as_they_are():
    for name, fields in (("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1}), ("llama", {}), ("mamba2", {})):
        config = make_config(name)
        assert dropout_of_blocks(config, describe(config)) == fields
