"""Refusals and warnings for outputs and dropout of a stock model's blocks that servers do not provide."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as weight_init

from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_protocol.errors import RequestRejected

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin
    from swarm_client.model.model_pass import DeepStack

_logger = logging.getLogger(__name__)


def wants(what: str, given: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Return whether a forward with the arguments ``given`` has to return the output named ``what``."""
    wanted = given.get(what)
    return bool(getattr(config, what, False) if wanted is None else wanted)


def refuse_inner_outputs(given: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise RequestRejected if a base model's forward has to return values from inside blocks."""
    if wants("output_attentions", given, config):
        raise RequestRejected(
            "output_attentions=True asks for attention weights, which stay on the servers: leave it out (hidden "
            "states can be had, with output_hidden_states=True)"
        )
    if given.get("output_router_logits"):
        raise RequestRejected(
            "output_router_logits=True asks for what the routers of experts return, which stays on the servers: set "
            "output_router_logits=False, or leave it out"
        )


def require_padding_mask(mask: Any) -> None:
    """Raise RequestRejected for an attention mask other than a tensor [batch, past + new] with 0 for padding."""
    if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return
    found = f"has shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
    raise RequestRejected(
        f"attention_mask {found}: expected a tensor [batch, tokens], 0 for padding. Servers make the model's causal "
        "and sliding masks from it, and take no others; sequences packed into one row are separated by position_ids"
    )


def require_no_shift(packed: bool, positions: torch.Tensor | None, deep_stack: DeepStack | None) -> None:
    """Raise RequestRejected for what trained prompts would shift: packed sequences, or positions on several axes."""
    if packed:
        raise RequestRejected(
            "position_ids begin again within a row: packed sequences cannot be trained with prompts, which "
            "stand before one sequence per row; send them in rows of their own, with an attention_mask"
        )
    if deep_stack is not None or (positions is not None and positions.dim() > 2):
        raise RequestRejected(
            "pictures of this model have positions on several axes, which trained prompts (tuning_mode) would shift: "
            "use one or the other"
        )


def without_router_logits(names: Sequence[str], given: dict[str, Any], config: PreTrainedConfig) -> dict:
    """Return arguments that keep a stock ``forward`` from computing router logits because its config says so.

    Args:
        names: the names of all arguments of ``forward``, of the model with its head.

    Raises:
        RequestRejected: the stock model would add the routers' auxiliary loss to the loss of ``labels``.
    """
    is_given = given.get("output_router_logits") is not None
    if is_given or "output_router_logits" not in names or not getattr(config, "output_router_logits", False):
        return {}
    if given.get("labels") is not None:
        raise RequestRejected(
            "config.output_router_logits=True adds the routers' auxiliary loss to that of labels, but what routers "
            "return stays on the servers: set output_router_logits=False (as an argument here or of from_pretrained, "
            "or model.config.output_router_logits=False), and the loss is without it"
        )
    return {"output_router_logits": False}


# ---------------------------------------------------------------- training


class NoDropout:
    """A warning, given once per model, about the dropout of its blocks in training. Servers compute without dropout."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._is_said = False

    def said(self, config: PreTrainedConfig) -> str:
        """Return the warning; an empty string if there is none, or if it was returned before."""
        if self._is_said:
            return ""
        self._is_said = True
        fields = ", ".join(f"{name}={value}" for name, value in dropout_of_blocks(config, self._family).items())
        if not fields:
            return ""
        return (
            f"servers train without the dropout in the model's own blocks ({fields} in its config): results are those "
            "of the local model with these set to 0. lora_dropout is applied"
        )

    def warn(self, config: PreTrainedConfig) -> None:
        """Log the warning. Forwards in training mode call this method."""
        if text := self.said(config):
            _logger.warning("%s. Pass them as 0 to from_pretrained to end this warning", text)


def notes_on_training(model: RemoteModelMixin) -> list[str]:
    """Return what a command reports before it trains ``model``, and turn off the router logits in its config."""
    notes = [text] if (text := model.no_dropout.said(model.config)) else []
    if getattr(model.config, "output_router_logits", False):
        model.config.update({"output_router_logits": False})
        notes.append("the loss is without the routers' auxiliary part (output_router_logits in the model's config)")
    return notes


def dropout_of_blocks(config: PreTrainedConfig, family: Family) -> dict[str, float]:
    """Return the config fields, with their values, that cause dropout or jitter in the stock model's blocks.

    A field counts if it is above 0 and a module in a block keeps its value. To find out, a model without values is
    made from a config in which each such field has a value that no other has.
    """
    marked, marks = copy.deepcopy(config), {}
    for number, (path, value) in enumerate(_random_fields(config)):
        holder = marked
        for name in path[:-1]:
            holder = getattr(holder, name)
        mark = 0.5 + (number + 1) / 1024  # a unique value, which is found again in the modules that use this field
        vars(holder)[path[-1]] = mark  # not ``setattr``, which checks types: some fields are integers
        marks[mark] = ".".join(path), value
    if not marks:
        return {}
    marked.update({"_attn_implementation_internal": "eager"})
    with hf_loader(), weight_init.no_init_weights(), torch.device("meta"):
        base = family.base_class(marked)
    blocks: nn.ModuleList = getattr(family.owner_of(base), family.blocks)
    used = {value for module in blocks.modules() for value in vars(module).values() if isinstance(value, float)}
    return dict(field for mark, field in marks.items() if mark in used)


def _random_fields(config: PreTrainedConfig) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from (((name, *path), inner) for path, inner in _random_fields(value))
        elif ("drop" in name or "jitter" in name) and isinstance(value, int | float) and value > 0:
            yield (name,), value
