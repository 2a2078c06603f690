"""Micro-batches through all stages of a model, and through the whole model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.settings import StageOptions, StageSource
from swarm_training.stages.engine.stage import Stage
from tests import zoo

Gradients = dict[str, Tensor]


def tokens(seed: int = 0, rows: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    """Token ids, and labels of which some count for nothing."""
    ids = torch.randint(3, zoo.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, : 3 + seed] = -100
    return ids, labels


def open_zoo(name: str, directory: Path, **overrides: object) -> ModelCheckpoint:
    zoo.save_checkpoint(name, directory, **overrides)  # type: ignore[arg-type]
    return ModelCheckpoint.open(directory)


def stages_of(source: StageSource, number: int, options: StageOptions | None = None) -> list[Stage]:
    return [build_stage(source, index, number, options) for index in range(number)]


def through(stages: Sequence[Stage], ids: Tensor, labels: Tensor, loss_scale: float = 1.0) -> tuple[float, Gradients]:
    """The loss sum, and every parameter's gradient; those that two stages have are added."""
    inputs = [ids]
    for stage in stages[:-1]:
        hidden = stage.forward(inputs[-1]).hidden
        assert hidden is not None
        inputs.append(hidden)
    found = stages[-1].backward(inputs[-1], labels, loss_scale=loss_scale)
    assert found.loss_sum is not None
    gradients = dict(zip(stages[-1].names, found.parameters, strict=True))
    last = found
    for stage, given in zip(reversed(stages[:-1]), reversed(inputs[:-1]), strict=True):
        last = stage.backward(given, grad=last.inputs)
        for name, gradient in zip(stage.names, last.parameters, strict=True):
            assert name not in gradients or name in stage.shared
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    assert last.inputs is None
    return found.loss_sum, gradients


def whole(directory: str, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def gradients_of(model, ids: Tensor, labels: Tensor) -> tuple[float, Gradients]:
    """Of the stock model: the mean loss, and every parameter's gradient."""
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    pairs = zip(trained.items(), found, strict=True)
    return float(loss.detach()), {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def num_targets(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())
