"""The building of a stage from a checkpoint or a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.hollow_model import load_tensors
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_training.stages.compress.layers import NONE
from swarm_training.stages.engine.boundaries import add_boundaries
from swarm_training.stages.engine.lora import add_lora
from swarm_training.stages.engine.settings import Scratch, StageOptions, StageSource, seed_of
from swarm_training.stages.engine.skeleton import InitWeights, Layout, config_of, layout_of, stage_class
from swarm_training.stages.engine.stage import Stage
from swarm_training.stages.placement.spans import split


def build_stage(source: StageSource, index: int, num_stages: int, options: StageOptions | None = None) -> Stage:
    """Build stage ``index`` of a model; no other part of the model is read or made. See ``split`` for its blocks.

    Raises:
        ValueError: there is no such stage, or it has no modules for LoRA, or the factor of the layers between stages
            does not divide the hidden size.
        UnsupportedModel: the model cannot be split.
        CheckpointError: a tensor is missing, damaged or of the wrong shape.
    """
    options = options or StageOptions()
    spans = split(describe(source.config).num_blocks, num_stages)
    if not 0 <= index < num_stages:
        raise ValueError(f"there is no stage {index}: expected 0 to {num_stages - 1}")
    layout = layout_of(source.config, spans[index])
    with torch.inference_mode(False):  # a caller's mode would make parameters that can never be trained
        model = _from_seed(source, layout) if isinstance(source, Scratch) else _from_checkpoint(source, layout)
        model.requires_grad_(True)
        if options.lora is not None:
            add_lora(model, options.lora, layout.span)
        if options.boundaries.layers != NONE:
            add_boundaries(model, options.boundaries, layout)
        model.to(options.device)  # type: ignore[arg-type]  # as transformers has wrapped it, mypy does not see self
        return Stage(model.eval(), layout, index, num_stages, options)  # without dropout, see ``Stage``


def _from_checkpoint(checkpoint: ModelCheckpoint, layout: Layout) -> PreTrainedModel:
    tensors: dict[str, StoredTensor] = {}
    for block in layout.span:
        tensors |= checkpoint.block_tensors(block)
    if layout.is_first or layout.is_last:
        tensors |= checkpoint.client_tensors()  # transformers reads those that this stage has modules for
    model, info = _load(checkpoint, layout, tensors, lambda _name, module, stock: stock(module))
    checkpoint.require_fit(info)
    return model


def _from_seed(source: Scratch, layout: Layout) -> PreTrainedModel:
    def initialize(name: str, module: nn.Module, stock: Callable[[nn.Module], None]) -> None:
        torch.default_generator.manual_seed(seed_of(source.seed, name))
        stock(module)

    with torch.random.fork_rng(devices=()):
        model, _ = _load(source, layout, {}, initialize)
    return model


def _load(
    source: StageSource,
    layout: Layout,
    tensors: dict[str, Any],
    init_weights: InitWeights,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model in fp32 on the CPU, and transformers' loading info."""
    return load_tensors(stage_class(layout, init_weights), config_of(source.config, layout), tensors, torch.float32)
