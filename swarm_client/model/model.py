"""Stock Hugging Face models whose blocks are remote."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from swarm_client.adapters.prompts import NEW_HEADS
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.core.draft_names import check_draft_name
from swarm_client.drafts.opening import open_speculation
from swarm_client.model.head import check_head_quant, quantize_head_
from swarm_client.model.hf_model import RemoteModelMixin, client_class
from swarm_client.model.masks import ATTENTION
from swarm_client.weights.opening import ModelOpening
from swarm_client.weights.progress import reading_shown
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_models.checkpoints.family import max_positions, slice_config, text_config
from swarm_models.checkpoints.hollow_model import load_tensors
from swarm_models.gpu.devices import named_device
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.failures import undone_on_error
from swarm_protocol.span import Span

_logger = logging.getLogger(__name__)
NUM_PROMPT_TOKENS = 16


class _Distributed:
    """The loader that the public classes share. It is never instantiated."""

    _auto_class: Any

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str = DEFAULT_MODEL,
        initial_peers: Sequence[str] | None = None,
        swarm: str | None = None,
        *,
        config: ClientConfig | None = None,
        revision: str | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        tuning_mode: str | None = None,
        num_prompt_tokens: int = NUM_PROMPT_TOKENS,
        **others: Any,
    ) -> RemoteModelMixin:
        """Load embeddings, norms and head. The swarm computes the blocks.

        Settings of the swarm come from a ``ClientConfig``, or from the keywords with the names of its fields, such as
        ``initial_peers``, ``draft`` or ``standby``. ``ClientConfig`` explains them.

        Args:
            name_or_path: a hub name, directory, GGUF file, or a short name that ``default_model.locate`` knows.
                ``swarm://NAME`` reads missing files from the swarm's members; ``swarm://`` means the swarm's only
                model. Given ``initial_peers``, members also send the files when the hub cannot be reached.
            initial_peers, swarm: fields of ``ClientConfig``.
            config: a config to use instead of the keywords with the names of its fields.
            revision: the branch, tag or commit of a hub model. Servers must serve the same revision; ``swarm://`` takes
                the revision that most of them serve.
            dtype: the dtype of the client's part; "auto" is float32 on the CPU and the checkpoint's dtype elsewhere.
            tuning_mode: "prompt" adds trained virtual tokens before every row; "deep_prompt" also adds others before
                every block. There are ``num_prompt_tokens``, and nothing else is trained. See ``model.prompts``.
            others: the other fields of ``ClientConfig``, and fields of the model's config, such as ``num_labels=3``.

        Returns:
            The stock class (such as ``LlamaForCausalLM``) with ``model.blocks`` and ``model.close()`` added. The model
            is also a context manager.

        Raises:
            ValueError: a value is out of its range, or both ``config`` and one of its fields are given.
            CheckpointError: the model cannot be read; UnsupportedModel: the model cannot be split.
            NoSwarm: no member of the swarm answers.
            AccessDenied: the swarm is private, and this client is not a member; the first pass raises this error.
            NoRoute: there are servers, but none has ``adapter``, or none is one of ``allowed_servers``.
        """
        config, others = _client_config(config, {**others, "initial_peers": initial_peers, "swarm": swarm or None})
        check_draft_name(config.draft)  # cheap errors come before anything is downloaded
        device = named_device(device)
        check_head_quant(config.head_quant, device)
        with contextlib.closing(ModelOpening(config)) as opening:
            checkpoint = opening.open(name_or_path, revision)
            connection = opening.swarm(checkpoint)
            background.run(connection.connect())
            with undone_on_error(lambda: background.run(connection.close())):
                model = load_client(checkpoint, cls._auto_class, dtype, device, others)
                if config.head_quant == "int8":
                    quantize_head_(model)
                speculation = open_speculation(config.draft, model, checkpoint)
                model.connect(connection, max_positions(checkpoint.config), speculation)
                if tuning_mode is not None:
                    model.add_prompts(tuning_mode, num_prompt_tokens)
        return model


class DistributedModel(_Distributed):
    """The counterpart of ``AutoModelForCausalLM`` for a swarm."""

    _auto_class = AutoModelForCausalLM


class DistributedModelForSequenceClassification(_Distributed):
    """The counterpart of ``AutoModelForSequenceClassification`` for a swarm."""

    _auto_class = AutoModelForSequenceClassification


def _client_config(config: ClientConfig | None, keywords: Mapping[str, Any]) -> tuple[ClientConfig, dict[str, Any]]:
    """Return the config, and the keywords that are not fields of it. A keyword that is None counts as not given."""
    own = {field.name for field in fields(ClientConfig)}
    others = {name: value for name, value in keywords.items() if name not in own}
    given = {name: value for name, value in keywords.items() if name in own and value is not None}
    if config is None:
        return ClientConfig(**given), others
    if not isinstance(config, ClientConfig):
        raise ValueError(
            f"config is a {type(config).__name__}: expected a swarm_client.ClientConfig. Fields of the model's own "
            "config are keyword arguments, such as num_labels=3"
        )
    if given:
        name = next(iter(given))
        raise ValueError(f"config and {name} are both given: expected ClientConfig({name}=…), or {name} without config")
    return config, others


def _overridden(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Return a copy of the model's config with these fields. Raise ValueError if it has no such field."""
    config = copy.deepcopy(config)
    for name, value in overrides.items():
        if not hasattr(config, name):
            raise ValueError(
                f"unexpected argument {name!r}: from_pretrained does not know it, nor does the model's config"
            )
        setattr(config, name, value)
    return config


def _stock_class(auto_class: Any, whole: PreTrainedConfig, text: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the stock class with a head for a model of this config.

    If ``text`` is only a part of the config, a class that takes pictures is preferred.
    """
    sees = text is not whole and auto_class is AutoModelForCausalLM
    for auto in (AutoModelForImageTextToText, auto_class) if sees else (auto_class,):
        if type(whole) in auto._model_mapping:
            found: Any = auto._model_mapping[type(whole)]
            return found
    raise UnsupportedModel(f"models of type {whole.model_type!r} have no {auto_class.__name__}")


def _with_one_block(whole: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of ``whole`` in which the language model, whose config is ``text``, has one block."""
    one_block = slice_config(text, Span(0, 1))
    if hasattr(text, "layer_types"):  # the model makes a rotary embedding for every type of block
        one_block.update({"layer_types": text.layer_types})
    if text is whole:
        return one_block
    name = next(name for name, part in vars(whole).items() if part is text)
    copied = copy.deepcopy(whole)
    setattr(copied, name, one_block)
    return copied


def load_client(
    checkpoint: ModelCheckpoint,
    auto_class: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    config_overrides: dict[str, Any] | None = None,
) -> RemoteModelMixin:
    """Return the client's half of a model, with unconnected remote blocks.

    Raises:
        CheckpointError: a tensor is missing, or its shape differs from the model's.
        UnsupportedModel: ``auto_class`` has no class for this type of model.
    """
    family, whole = checkpoint.family, _overridden(checkpoint.whole_config, config_overrides or {})
    config = text_config(whole)
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else whole.dtype or config.dtype or torch.bfloat16
    own_class = client_class(_stock_class(auto_class, whole, config), family)
    model: RemoteModelMixin
    with reading_shown(checkpoint.client_tensors()) as tensors:
        model, info = load_tensors(own_class, _with_one_block(whole, config), tensors, dtype)
    for name in checkpoint.require_fit(info, optional=() if auto_class is AutoModelForCausalLM else NEW_HEADS):
        _logger.warning("%s is not in the checkpoint: it starts untrained", name)
    model.fill_blocks(config)
    _set_configs(model, family.base_class, whole, config)
    config.update({"_attn_implementation_internal": ATTENTION})  # stock code then makes ``MaskFacts`` for its blocks
    model.adopt(checkpoint)
    return model.eval().to(device)


def _set_configs(model: RemoteModelMixin, base_class: type, whole: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Replace the config with one block by that of the whole model, and by ``text`` in the text model's modules."""
    inside = set(next(module for module in model.modules() if isinstance(module, base_class)).modules())
    module: Any
    for module in model.modules():
        # Vision towers have configs of other types, which are complete already.
        if hasattr(module, "config") and (module in inside or isinstance(module.config, type(whole))):
            module.config = text if module in inside else whole
