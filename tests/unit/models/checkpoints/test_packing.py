"""Packed sequences: every family attends as the whole model does on one machine, and sends back the same gradients."""

from __future__ import annotations

import inspect
from dataclasses import InitVar, dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import Family, slice_config
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack, load_blocks
from tests.families import OFTEN_FEW
from tests.zoo import BLOCKS, VOCAB, save_checkpoint

SAMPLES = ((5, 12, 3), (9, 11))  # of each row; some are longer than a sliding window or chunk
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in SAMPLES])
KEEP_APART = ("llama", "mistral-sliding", "gemma3_text", "jamba")  # others may: that depends on transformers' version


@dataclass
class Chain(nn.Module):
    """Stands for the blocks of the whole model, of which ``first`` is one, and sends hidden states through servers."""

    stacks: list[BlockStack]
    packed: bool
    first: InitVar[nn.Module]

    def __post_init__(self, first: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(first).items() if isinstance(value, str)})  # its type

    __hash__ = nn.Module.__hash__

    def forward(self, hidden: torch.Tensor, *_args, **_kwargs):
        for stack in self.stacks:
            hidden = stack(hidden, None, POSITIONS, packed=self.packed)
        return (hidden, None) if self.stacks[0].family.returns_tuple else hidden


def load(name: str, directory: Path) -> tuple[PreTrainedModel, list[BlockStack]]:
    save_checkpoint(name, directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    checkpoint = ModelCheckpoint.open(directory)
    return model, [load_blocks(checkpoint, span) for span in (Span(0, 2), Span(2, BLOCKS))]


def base_of(model: PreTrainedModel, family: Family) -> PreTrainedModel:
    return next(module for module in model.modules() if isinstance(module, family.base_class))


def takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.base_model.forward).parameters


def loss_and_gradient(model: PreTrainedModel, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a cache, with the positions of packed samples; the gradient is that of the embeddings."""
    ids = torch.randint(3, VOCAB, POSITIONS.shape, generator=torch.Generator().manual_seed(1))
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    positions = {"position_ids": POSITIONS} if takes_positions(model) else {}
    logits = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False, **positions).logits
    labels = ids.masked_fill(POSITIONS == 0, -100)[:, 1:]  # nobody guesses the first token of a sample
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
    return loss.detach(), torch.autograd.grad(loss, embeddings)[0]


@pytest.mark.parametrize("name", OFTEN_FEW)
def test_every_family_keeps_apart_what_the_whole_model_does(name, tmp_path):
    model, stacks = load(name, tmp_path)
    whole = {
        packed: loss_and_gradient(model, None if packed else torch.ones_like(POSITIONS)) for packed in (True, False)
    }
    difference = (whole[True][1] - whole[False][1]).abs().max() / whole[True][1].abs().max()
    assert difference > 0.1 or (name not in KEEP_APART and difference < 1e-5)
    family = stacks[0].family
    base = base_of(model, family)
    owner = family.owner_of(base)
    first = getattr(owner, family.blocks)[0]
    model.config = base.config = owner.config = slice_config(model.config, Span(0, 1))
    for packed, (loss, gradient) in whole.items():
        setattr(owner, family.blocks, nn.ModuleList([Chain(stacks, packed, first)]))
        split_loss, split_gradient = loss_and_gradient(model, None)
        torch.testing.assert_close(split_loss, loss, rtol=1e-6, atol=0)
        assert (split_gradient - gradient).abs().max() <= 1e-5 * gradient.abs().max()
