"""Facts about a model that is not built: its config, and how its family splits into embeddings, blocks and head.

``describing.py`` derives the family from a config.
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

# Models that create their own cache class if ``use_cache`` is set, and otherwise use the cache that they are given.
OWN_CACHE_CLASS = {"minimax"}

# Linear layers that must stay unquantised: their family's code reads the weights itself (mamba, falcon_mamba, jamba).
WEIGHT_IS_READ = {"dt_proj"}

# Models of which servers compute the text alone: their pictures are added to the hidden states before blocks far apart.
TEXT_ALONE = {"granite4_vision"}

PER_BLOCK_PROPERTIES = ("layer_types", "layers_block_type", "kv_sharing_modes")  # properties of some configs


@dataclass(frozen=True)
class Family:
    """The layout of one model. Names are attributes of the owner, the module that holds the list of blocks.

    Attributes:
        model_type: Hugging Face's name for the architecture.
        base_class: the stock model without head, such as ``LlamaModel``.
        owner: path of the owner inside the base model; empty if it is the base model itself.
        blocks: attribute of the owner that holds the ``nn.ModuleList`` of blocks.
        embedding: attribute that holds the token embedding; only the client has it.
        positions: learned position embeddings; only the client has them, a server adds zero instead.
        identities: embedding norm, final norm and projections; only the client has them, a server skips them.
        neutral: plain attributes that a server sets to the given value, such as an embedding multiplier.
        returns_tuple: a block returns ``(hidden, attentions)`` rather than ``hidden``.
        takes_positions: the base model's ``forward`` accepts ``position_ids``.
        position_axes: how many positions a part of a picture has: 3 (time, height and width) in the models of
            Qwen2-VL's kind, otherwise 1.
        cache_argument: name of the cache argument of the base model's ``forward``.
        mask_covers_past: the mask is [batch, past + new]; else it is [batch, new], because the base model passes it to
            its blocks unchanged (mamba).
        num_blocks, hidden_size: as in the config.
        block_parameters: for each block, the number of its parameters.
        linears: for each block, the name of every linear layer within the block, with the number of its weights.
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
    position_axes: int
    cache_argument: str
    mask_covers_past: bool
    num_blocks: int
    hidden_size: int
    block_parameters: tuple[int, ...]
    linears: tuple[tuple[tuple[str, int], ...], ...]

    @property
    def all_blocks(self) -> Span:
        return Span(0, self.num_blocks)

    def cache_arguments(self, cache: Any, use_cache: bool) -> dict[str, Any]:
        """Return the arguments of the base model's ``forward`` that pass it this cache; None means no cache."""
        return {self.cache_argument: cache, "use_cache": use_cache and self.model_type not in OWN_CACHE_CLASS}

    def owner_of(self, base: nn.Module) -> nn.Module:
        """Return the module inside ``base`` (an instance of ``base_class``) that holds the block list."""
        return base.get_submodule(self.owner)

    def block_index(self, tensor_name: str) -> int | None:
        """Return the index of the block that a checkpoint tensor belongs to; None for embeddings, norms and heads.

        Checkpoints of some models hold extra blocks past ``num_blocks`` (for multi-token prediction).
        """
        match = _block_pattern(self.blocks).search(tensor_name)
        return None if match is None else int(match[1])

    def name_in_block(self, tensor_name: str) -> str:
        """Return the name within the block: ``mlp.weight`` for ``model.layers.3.mlp.weight``; else the whole name."""
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


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model inside a model that also sees; ``config`` itself for other models."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def sees(config: PreTrainedConfig) -> bool:
    """Return whether a model of this (whole) config takes pictures, also in a swarm: see ``TEXT_ALONE``."""
    return text_config(config) is not config and config.model_type not in TEXT_ALONE


def slice_config(config: PreTrainedConfig, span: Span) -> PreTrainedConfig:
    """Return a copy of ``config`` for the blocks of ``span`` alone: every per-block list is cut accordingly."""
    sliced = copy.deepcopy(config)
    for name, value in vars(config).items():
        per_block = isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
        # Lists of token ids or class names may have this length by chance.
        if per_block and not name.startswith("_") and not name.endswith(("token_id", "architectures")):
            setattr(sliced, name, value[span.start : span.end])
    computed = {}
    for name in PER_BLOCK_PROPERTIES:
        if isinstance(getattr(type(config), name, None), property):
            computed[name] = getattr(config, name)[span.start : span.end]
    if computed:  # properties have no setters: a subclass has the cut lists in their place
        sliced.__class__ = type(type(config).__name__, (type(config),), computed)
    sliced.update({"num_hidden_layers": len(span)})
    return sliced


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence that the model supports; None if it has no limit (alibi, or none in the config)."""
    if getattr(config, "alibi", False):
        return None
    for name in ("max_position_embeddings", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def has_experts(config: PreTrainedConfig) -> bool:
    """Return whether blocks choose among experts. Then a tiny rounding error can change which experts compute."""
    return any("expert" in name and bool(value) for name, value in config.to_dict().items())


def rope_depends_on_length(config: PreTrainedConfig) -> bool:
    """Return whether the longest position of a batch selects the rotary embeddings (dynamic NTK, LongRoPE).

    Such a model must get a prompt in one piece, and each session alone, to compute the same as it does locally.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return any(entry.get("rope_type", entry.get("type")) in ("dynamic", "longrope") for entry in [parameters, *nested])
