"""What is known of a model without building it: how its family splits into embeddings | blocks | head, and its config.

``describing.py`` finds the family of a config.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from swarm_protocol.span import Span

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# They insist on a cache class of their own if asked to use a cache, and use any that they are given if not.
OWN_CACHE_CLASS = {"minimax"}

# Linear layers by whose weights a family's own code multiplies: they must stay plain (mamba, falcon_mamba, jamba).
WEIGHT_IS_READ = {"dt_proj"}

PER_BLOCK_PROPERTIES = ("layer_types", "layers_block_type", "kv_sharing_modes")  # which some configs compute


@dataclass(frozen=True)
class Family:
    """Where the parts of one model are. Names are attributes of the owner: the module that holds the block list.

    Attributes:
        model_type: Hugging Face's name for the architecture.
        base_class: the stock model without head, such as ``LlamaModel``.
        owner: path of the owner inside the base model; empty if it is the base model itself.
        blocks: attribute of the owner that holds the ``nn.ModuleList`` of blocks.
        embedding: attribute that holds the token embedding; client only.
        positions: learned position embeddings; client only, a server adds zero instead.
        identities: embedding norm, final norm, projections; client only, a server passes through.
        neutral: plain attributes that a server sets to the given value, such as an embedding multiplier.
        returns_tuple: a block returns ``(hidden, attentions)`` rather than ``hidden``.
        takes_positions: the base model's ``forward`` accepts ``position_ids``.
        cache_argument: name under which the base model's ``forward`` takes the cache.
        mask_covers_past: the mask is [batch, past + new]; else it is [batch, new], because the base model hands it to
            its blocks as it is (mamba).
        num_blocks: how many blocks the model has.
        hidden_size: width of the hidden states between blocks.
        block_parameters: how many parameters each block has.
        linears: of each block, the names of its linear layers in it, each with the number of its weights.
    """

    model_type: str
    base_class: type[PreTrainedModel]
    owner: str
    blocks: str
    embedding: str
    positions: tuple[str, ...]
    identities: tuple[str, ...]
    neutral: tuple[tuple[str, Any], ...]
    returns_tuple: bool
    takes_positions: bool
    cache_argument: str
    mask_covers_past: bool
    num_blocks: int
    hidden_size: int
    block_parameters: tuple[int, ...]
    linears: tuple[tuple[tuple[str, int], ...], ...] = ()

    @property
    def all_blocks(self) -> Span:
        return Span(0, self.num_blocks)

    def cache_arguments(self, cache: Any, use_cache: bool) -> dict[str, Any]:
        """Arguments of the base model's ``forward`` by which it uses this cache, or none."""
        return {self.cache_argument: cache, "use_cache": use_cache and self.model_type not in OWN_CACHE_CLASS}

    def owner_of(self, base: nn.Module) -> nn.Module:
        """The module inside ``base`` (an instance of ``base_class``) that holds the block list."""
        return base.get_submodule(self.owner)

    def block_index(self, tensor_name: str) -> int | None:
        """Which block a checkpoint tensor belongs to; None for embeddings, norms and heads.

        Checkpoints of some models hold extra blocks past ``num_blocks`` (for multi-token prediction).
        """
        match = _block_pattern(self.blocks).search(tensor_name)
        return None if match is None else int(match[1])

    def name_in_block(self, tensor_name: str) -> str:
        """``self_attn.q_proj.weight`` of ``model.layers.3.self_attn.q_proj.weight``; itself outside the blocks."""
        match = _block_pattern(self.blocks).search(tensor_name)
        return tensor_name if match is None else tensor_name[match.end() :]


@lru_cache
def _block_pattern(blocks: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.){re.escape(blocks)}\.(\d+)\.")


def cache_argument_of(function: Callable[..., Any]) -> str | None:
    """Return the name of the argument that is annotated as a ``Cache``, or None if there is none.

    transformers renamed this argument of its models in 5.24, so the name is read from the signature.
    """
    from transformers.cache_utils import Cache

    for name, argument in inspect.signature(function).parameters.items():
        classes = get_args(argument.annotation) or (argument.annotation,)  # ``Cache | None`` has two
        if any(isinstance(found, type) and issubclass(found, Cache) for found in classes):
            return name
    return None


def slice_config(config: PreTrainedConfig, span: Span) -> PreTrainedConfig:
    """A copy of ``config`` for a model of the blocks of ``span`` alone: every per-block list is cut accordingly."""
    sliced = copy.deepcopy(config)
    for name, value in vars(config).items():
        per_block = isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
        if per_block and not name.startswith("_") and not name.endswith(("token_id", "architectures")):
            setattr(sliced, name, value[span.start : span.end])
    computed = {}
    for name in PER_BLOCK_PROPERTIES:
        if isinstance(getattr(type(config), name, None), property):
            computed[name] = getattr(config, name)[span.start : span.end]
    if computed:
        sliced.__class__ = type(type(config).__name__, (type(config),), computed)
    sliced.num_hidden_layers = len(span)
    return sliced


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence the model was made for; None if it has no limit (alibi, or the config names none)."""
    if getattr(config, "alibi", False):
        return None
    for name in ("max_position_embeddings", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def has_experts(config: PreTrainedConfig) -> bool:
    """Whether blocks choose among experts, so that the least rounding may decide which of two compute."""
    return any("expert" in name and bool(value) for name, value in config.to_dict().items())


def rope_depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether rotary embeddings are chosen by the longest position of a batch (dynamic NTK, LongRoPE).

    Such a model must see a prompt in one piece and sessions one by one to compute what it does alone.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return any(entry.get("rope_type", entry.get("type")) in ("dynamic", "longrope") for entry in [parameters, *nested])
