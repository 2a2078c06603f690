"""Adapters that the server loads at its start; clients choose them by name, which is that of the directory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as weight_init

from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_models.checkpoints.peft_files import read_adapter
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.adapters.targets import require_fit
from swarm_server.engine.engine import Engine


def adapter_names(paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(path.resolve().name for path in paths)


def check_adapters(paths: Sequence[Path], family: Family, config: PreTrainedConfig) -> None:
    """Check that the adapters fit the model, including all its blocks.

    Raises:
        CheckpointError: an adapter cannot be read. ValueError: an adapter does not fit.
    """
    if not paths:
        return
    with hf_loader(), weight_init.no_init_weights(), torch.device("meta"):
        base = family.base_class(copy.deepcopy(config))
    blocks: nn.ModuleList = getattr(family.owner_of(base), family.blocks)
    for path in paths:
        adapter = read_adapter(path, family)
        try:
            require_fit(adapter, family.all_blocks, family.hidden_size, lambda index: blocks[index])
        except RequestRejected as error:
            raise ValueError(f"adapter {path} does not fit the model: {error}") from None


def load_adapters(paths: Sequence[Path], family: Family, engine: Engine, span: Span) -> dict[str, PlacedAdapter]:
    """Return the parts of the adapters that lie in ``span``, by name.

    Raises:
        CheckpointError, RequestRejected: an adapter has changed since it was checked.
    """
    placed = {}
    for name, path in zip(adapter_names(paths), paths, strict=True):
        adapter: Adapter = read_adapter(path, family).over(span)
        placed[name] = engine.place(adapter.serialize()[1], adapter)
    return placed
