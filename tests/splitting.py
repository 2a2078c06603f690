"""The whole model on one machine beside the same model split over stacks of blocks: what differs, step by step."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from swarm_client.model.model import load_client
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import cache_argument_of, slice_config
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack, load_blocks
from tests.zoo import VOCAB

BATCH, TOKENS, PROMPT, PADDED = 2, 16, 11, 5
LEFT, RIGHT = Span(0, 4), Span(2, 6)  # two servers whose blocks overlap


@dataclass
class Swarm:
    """The whole model, the two servers, and the model's embeddings and head around them."""

    directory: Path
    whole: PreTrainedModel
    servers: tuple[BlockStack, ...]

    @classmethod
    def load(cls, directory: Path) -> Swarm:
        checkpoint = ModelCheckpoint.open(directory)
        return cls(directory, load_whole(directory), tuple(load_blocks(checkpoint, span) for span in (LEFT, RIGHT)))

    @property
    def name(self) -> str:
        return self.whole.config.model_type

    def chain(self, *spans: str) -> list[BlockStack]:
        return [self.stack(Span.parse(span)) for span in spans]

    def stack(self, span: Span) -> BlockStack:
        return next(server for server in self.servers if server.span.covers(span)).view(span)


class Hops(nn.Module):
    """Stands for the block list of the whole model and sends hidden states through a chain of stacks."""

    def __init__(self, chain: list[BlockStack], attention_mask, position_ids, caches) -> None:
        super().__init__()
        self.chain, self.caches = chain, caches
        self.attention_mask, self.position_ids = attention_mask, position_ids
        self.block_type = "mamba"  # nemotron_h's own code looks for it

    def forward(self, hidden: torch.Tensor, *_args, **_kwargs):
        for stack, cache in zip(self.chain, self.caches, strict=True):
            hidden = stack(hidden, self.attention_mask, self.position_ids, cache)
        return (hidden, None) if self.chain[0].family.returns_tuple else hidden


class LengthOnly(DynamicCache):
    """The client's cache: it has no keys and values, but knows how many tokens the servers have seen."""

    length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0


def load_whole(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Plain transformers, with weights in memory of their own.

    Left mapped from the file they lie at odd addresses, for which matrix products round differently (by 1e-6).
    """
    whole = AutoModel.from_pretrained(directory, dtype=dtype)
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    return whole


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def padding(padded: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The mask (None without padding) and the positions of a batch, whose first row may be padded on the left."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, :PADDED] = 0 if padded else 1
    return mask if padded else None, (mask.cumsum(-1) - 1).clamp(min=0)


def run(model: PreTrainedModel, position_ids: torch.Tensor, **inputs) -> torch.Tensor:
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = position_ids
    cache = inputs.pop("past_key_values", None)
    is_mamba = model.config.model_type in ("mamba", "falcon_mamba", "mamba2")
    if is_mamba and cache is not None and cache.has_previous_state(0):
        inputs["attention_mask"] = None  # as mamba's own ``generate`` does
    inputs[cache_argument_of(model.forward)] = cache
    inputs["use_cache"] = cache is not None
    return model(**inputs).last_hidden_state


def run_split(
    swarm: Swarm, chain: list[BlockStack], caches: list[Cache | None], position_ids: torch.Tensor, **inputs
) -> torch.Tensor:
    """The whole model with its blocks replaced by the chain."""
    family, model = chain[0].family, swarm.whole
    owner, config = family.owner_of(model), model.config
    blocks, owner_config = getattr(owner, family.blocks), owner.config
    hops = Hops(chain, inputs.get("attention_mask"), position_ids, caches)
    setattr(owner, family.blocks, nn.ModuleList([hops]))
    model.config = owner.config = slice_config(config, Span(0, 1))
    try:
        return run(model, position_ids, **inputs)
    finally:
        setattr(owner, family.blocks, blocks)
        model.config, owner.config = config, owner_config


def tolerance_of_generation(model_type: str) -> float:
    """Single steps of mamba's scan multiply parts of tensors, which round by where they happen to lie."""
    return 1e-4 if model_type in ("jamba", "mamba", "falcon_mamba") else 0.0


def difference_of_forward(swarm: Swarm, chain: list[BlockStack], padded: bool = False) -> float:
    mask, positions = padding(padded)
    inputs = dict(input_ids=tokens(), attention_mask=mask)
    with torch.inference_mode():
        whole = run(swarm.whole, positions, **inputs)
        split = run_split(swarm, chain, [None] * len(chain), positions, **inputs)
    return largest_difference(whole, split, mask)


def difference_of_generation(swarm: Swarm, chain: list[BlockStack], padded: bool) -> float:
    """Prefill, then one token at a time, through caches; the largest difference over all steps."""
    mask, positions = padding(padded)
    whole_cache, client_cache = DynamicCache(config=swarm.whole.config), LengthOnly()
    caches = [stack.new_cache() for stack in chain]
    differences, start = [], 0
    for end in (PROMPT, *range(PROMPT + 1, TOKENS + 1)):
        step = slice(start, end)
        inputs = dict(input_ids=tokens()[:, step], attention_mask=None if mask is None else mask[:, :end])
        with torch.inference_mode():
            whole = run(swarm.whole, positions[:, step], past_key_values=whole_cache, **inputs)
            split = run_split(swarm, chain, caches, positions[:, step], past_key_values=client_cache, **inputs)
        differences.append(largest_difference(whole, split, None if mask is None else mask[:, step]))
        client_cache.length = start = end
    return max(differences)


def largest_difference(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None) -> float:
    difference = (a - b).abs()
    return (difference if mask is None else difference * mask.unsqueeze(-1)).max().item()


def require_that_a_client_loads_its_own(directory: Path) -> None:
    """What a client loads of a model is what the whole model has under these names."""
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    client = load_client(ModelCheckpoint.open(directory), AutoModelForCausalLM, torch.float32, torch.device("cpu"))
    own = client.state_dict()
    assert own and all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in own.items())
