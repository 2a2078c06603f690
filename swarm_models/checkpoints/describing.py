"""The derivation of a model's ``Family`` from its config: how a decoder splits into embeddings, blocks and head.

The facts are read from the stock base-model class, built on the meta device, and then probed. Without its blocks,
the base model must return hidden states unchanged; otherwise the model is refused. The tables below hold the facts
that cannot be read from the class.
"""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers import initialization as weight_init
from transformers.pytorch_utils import Conv1D

from swarm_models.checkpoints.family import Family, cache_argument_of, max_positions
from swarm_models.checkpoints.hollow_model import RangesOnCpu, hf_loader, load_hollow_model
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.failures import any_error_as
from swarm_protocol.imports.versions import untested_transformers
from swarm_protocol.wire.constants import MAX_POSITIONS_WITH_AXES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attributes of the owner that scale embeddings (granite, hyperclovax), each with the value that has no effect.
NEUTRAL_ATTRIBUTES: dict[str, Any] = {"embedding_multiplier": 1.0}

_SHARES = "its blocks share keys, values or embeddings with one another"
_HANDS_OVER = "its blocks hand one another more than hidden states"
_STATE_IN_BLOCKS = (
    "its blocks keep their recurrent state in themselves instead of a cache, for one generation at a time"
)
_ATTENDS_TWICE = "each of its blocks attends twice, with two entries of the cache where a server keeps one"
_STREAMS = "its blocks hand one another several streams of hidden states"
REJECTED: dict[str, str] = {
    "deepseek_v4": f"{_STREAMS}, keep tokens that are not compressed yet, and choose experts by token ids",
    "gemma3n": _SHARES,
    "gemma3n_text": _SHARES,
    "gemma4": _SHARES,
    "gemma4_text": _SHARES,
    "inkling2_text": _HANDS_OVER,
    "longcat_flash": _ATTENDS_TWICE,
    "hy_v4": f"{_STREAMS}, and the positions that an index has chosen",
    "qwen4_exp_text": _STREAMS,
    "recurrent_gemma": _STATE_IN_BLOCKS,
    "zamba": _SHARES,
    "zamba2": _SHARES,
    "zaya": _HANDS_OVER,
}

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
# Blocks with a recurrent state of fixed size, with or without attention
STATE_TYPES = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
NO_CACHE_TYPES = {"mlp", "moe"}
LAYER_TYPES = ATTENTION_TYPES | STATE_TYPES | NO_CACHE_TYPES

# A server can run a base model only if its ``forward`` accepts these arguments and a cache.
MODEL_ARGUMENTS = ("inputs_embeds", "attention_mask", "use_cache")

# A base model may pass these tensors to a block besides the hidden states: they depend only on positions and mask.
BLOCK_ARGUMENTS = {
    "alibi",
    "attention_mask",
    "attention_scaling",
    "cache_position",
    "causal_mask",
    "conv_mask",
    "head_mask",
    "mamba_attention_mask",
    "position_bias",
    "position_embeddings",
    "position_ids",
}


_DESCRIBED: dict[tuple[type, str], Family] = {}


def describe(config: PreTrainedConfig) -> Family:
    """Return the family of a model with this config; the result is cached for equal configs.

    Raises:
        UnsupportedModel: the model cannot be split; the message gives the model type and the reason.
    """
    key = (type(config), config.to_json_string(use_diff=False))
    if key not in _DESCRIBED:
        with hf_loader():
            _DESCRIBED[key] = _describe(config)
    return _DESCRIBED[key]


def _describe(config: PreTrainedConfig) -> Family:
    _check_config(config)
    base_class: Any = MODEL_MAPPING[type(config)]
    with any_error_as(partial(_not_built, config)), weight_init.no_init_weights(), torch.device("meta"), RangesOnCpu():
        base = base_class(copy.deepcopy(config))  # a copy, because the constructor writes into the config
    family = _read_facts(base, config)
    _check_blocks(base, family)
    return _probe(base, family, config)


def has_states(family: Family, config: PreTrainedConfig) -> bool:
    """Return whether some blocks keep a recurrent state. Servers then compute prompts that begin alike separately."""
    return bool(family.base_class._is_stateful) or not STATE_TYPES.isdisjoint(
        getattr(config, "layer_types", None) or ()
    )


def _unsupported(config: PreTrainedConfig, why: str) -> UnsupportedModel:
    untested = untested_transformers()
    advice = f" ({untested})" if untested else ""
    return UnsupportedModel(f"models of type {config.model_type!r} cannot be split into blocks: {why}{advice}")


def _check_config(config: PreTrainedConfig) -> None:
    if config.model_type in REJECTED:
        raise _unsupported(config, REJECTED[config.model_type])
    if config.is_encoder_decoder:
        raise _unsupported(config, "it is an encoder-decoder, expected a decoder")
    if config.get_text_config(decoder=True) is not config:
        raise _unsupported(config, "it wraps a text model together with others, expected the text model's config")
    if type(config) not in MODEL_MAPPING:
        raise _unsupported(config, "transformers has no stock model for it")
    _check_layers(config)
    for name in ("num_hidden_layers", "hidden_size"):
        if not isinstance(getattr(config, name, None), int):
            raise _unsupported(config, f"its config does not say {name}")


def _check_layers(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel if the config names blocks of unknown types, or blocks that share something."""
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        raise _unsupported(config, f"it has blocks of type {', '.join(sorted(others))}, which servers do not know")
    if getattr(config, "num_kv_shared_layers", 0) or any(getattr(config, "kv_sharing_modes", None) or ()):
        raise _unsupported(config, _SHARES)
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        raise _unsupported(config, "its blocks hand one another the positions that an index has chosen")


def _read_facts(base: PreTrainedModel, config: PreTrainedConfig) -> Family:
    arguments = inspect.signature(base.forward).parameters
    lacking = [name for name in MODEL_ARGUMENTS if name not in arguments]
    cache_argument = cache_argument_of(base.forward)
    if cache_argument is None:
        lacking.append("a Cache")
    if lacking or cache_argument is None:
        raise _unsupported(config, f"its forward does not accept {', '.join(lacking)}")
    path = _find_blocks(base, config)
    owner_path, _, blocks = path.rpartition(".")
    owner = base.get_submodule(owner_path)
    embedding, positions, identities = _sort_parts(owner, blocks, base.get_input_embeddings(), config)
    if embedding is None:
        raise _unsupported(config, f"its token embedding is not beside its list of blocks {path!r}")
    return Family(
        model_type=config.model_type,
        base_class=type(base),
        owner=owner_path,
        blocks=blocks,
        embedding=embedding,
        positions=tuple(positions),
        identities=tuple(identities),
        neutral=tuple((name, value) for name, value in NEUTRAL_ATTRIBUTES.items() if hasattr(owner, name)),
        returns_tuple=False,
        takes_positions="position_ids" in arguments,
        position_axes=_position_axes(owner, config),
        cache_argument=cache_argument,
        mask_covers_past=True,
        num_blocks=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        block_parameters=tuple(sum(p.numel() for p in block.parameters()) for block in getattr(owner, blocks)),
        linears=tuple(
            tuple(
                (name, part.weight.numel())
                for name, part in block.named_modules()
                if isinstance(part, nn.Linear | Conv1D)
            )
            for block in getattr(owner, blocks)
        ),
    )


def _position_axes(owner: nn.Module, config: PreTrainedConfig) -> int:
    """Return the number of axes of positions: rotary embeddings with several divide their channels among these axes."""
    limit = max_positions(config)
    has_axes = any(hasattr(child, "mrope_section") for child in owner.children())
    return 3 if has_axes and limit is not None and limit <= MAX_POSITIONS_WITH_AXES else 1


def _find_blocks(base: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Return the path of the model's only list of blocks."""
    # Lists with a number in their path are inside a block, such as a list of experts.
    lists: list[str] = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers and not re.search(r"\d", name)
    ]
    if len(lists) != 1:
        found = ", ".join(lists) or "none"
        raise _unsupported(config, f"expected one list of {config.num_hidden_layers} blocks, found {found}")
    return lists[0]


def _sort_parts(
    owner: nn.Module, blocks: str, token_embedding: nn.Module, config: PreTrainedConfig
) -> tuple[str | None, list[str], list[str]]:
    """Return the names of the owner's token embedding, of its tables of positions, and of its layers to bypass."""
    embedding, positions, identities = None, [], []
    for name, child in owner.named_children():
        if name == blocks:
            continue
        if child is token_embedding:
            embedding = name
        elif isinstance(child, nn.Embedding) or "PositionalEmbedding" in type(child).__name__:
            positions.append(name)
        elif isinstance(child, nn.Linear | nn.LayerNorm) or "Norm" in type(child).__name__:
            identities.append(name)
        elif any(True for _ in child.parameters()):
            raise _unsupported(config, f"the use of its part {name!r} ({type(child).__name__}) is not known")
    return embedding, positions, identities


def _check_blocks(base: PreTrainedModel, family: Family) -> None:
    """Raise UnsupportedModel if two blocks share a parameter, because they may be on different servers."""
    blocks = getattr(family.owner_of(base), family.blocks)
    owners: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            if owners.setdefault(id(parameter), index) != index:
                raise _unsupported(base.config, f"blocks {owners[id(parameter)]} and {index} share parameters")


class _Recorder:
    """A replacement for a block's ``forward`` that returns the hidden states and records the other arguments."""

    def __init__(self, block: nn.Module, returns_tuple: bool) -> None:
        self._names = list(inspect.signature(type(block).forward).parameters)[2:]  # skips self and the hidden states
        self._returns_tuple = returns_tuple
        self.arguments: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()
        self.mask_dims: set[int | None] = set()  # None: a block was called without a mask

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, None]:
        self.shapes.add(tuple(hidden.shape))
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self.arguments |= {name for name, value in given.items() if _has_tensor(value)}
        mask = given.get("attention_mask")
        self.mask_dims.add(mask.dim() if isinstance(mask, torch.Tensor) else None)
        return (hidden, None) if self._returns_tuple else hidden


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _probe(base: PreTrainedModel, family: Family, config: PreTrainedConfig) -> Family:
    """Run the base model with blocks that do nothing, and check that it returns exactly its input.

    The run also shows whether the base model expects blocks to return tuples, and which masks it passes to them.
    """
    with any_error_as(partial(_not_built, config)):  # there may be no memory for tables of that size, too
        hollow, _ = load_hollow_model(family, config)
    # The model's own blocks, though nothing of them runs: its code reads their attributes, such as the attention type.
    blocks = getattr(family.owner_of(base), family.blocks)
    setattr(family.owner_of(hollow), family.blocks, blocks)
    hidden = torch.randn(2, 3, family.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])  # padded, because transformers may drop a mask without padding
    problem = None
    for returns_tuple in (False, True):
        recorder = _Recorder(blocks[0], returns_tuple)
        for block in blocks:
            block.forward = recorder
        try:
            with any_error_as(partial(_not_run, config)), torch.inference_mode():
                output = hollow(inputs_embeds=hidden, attention_mask=mask, use_cache=False).last_hidden_state
        except UnsupportedModel as error:
            problem = problem or error
            continue
        unknown = sorted(recorder.arguments - BLOCK_ARGUMENTS)
        if unknown:
            raise _unsupported(config, f"its blocks also need {', '.join(unknown)}, which a server does not have")
        if output.shape == hidden.shape and recorder.shapes == {tuple(hidden.shape)}:
            if torch.equal(output, hidden):
                return replace(family, returns_tuple=returns_tuple, mask_covers_past=recorder.mask_dims != {mask.dim()})
            problem = _unsupported(config, "it changes hidden states outside its blocks")
    raise problem or _unsupported(config, "hidden states change their shape between its blocks")


def _not_built(config: PreTrainedConfig, error: Exception) -> UnsupportedModel:
    return _unsupported(config, f"transformers cannot build it from this config ({_with_type(error)})")


def _not_run(config: PreTrainedConfig, error: Exception) -> UnsupportedModel:
    return _unsupported(config, f"without its blocks it fails with {_with_type(error)}")


def _with_type(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
