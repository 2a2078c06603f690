"""The optimizers that a run file can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from swarm_training.optim.lamb import LAMB
from swarm_training.optim.muon import MuonWithAdamW
from swarm_training.optim.offload import AdamW8bit, LAMB8bit

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "lamb": LAMB,
    "lamb8bit": LAMB8bit,
    "adamw8bit": AdamW8bit,
    "muon": MuonWithAdamW,
}


def decay_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, decay_vectors: bool = True
) -> list[dict[str, Any]]:
    """Return an optimizer's groups. Unless ``decay_vectors``, parameters of fewer than two dimensions, such as biases
    and the scales of norms, are in a group without weight decay."""
    given = list(parameters)
    vectors = [] if decay_vectors else [each for each in given if each.dim() < 2]
    others = given if decay_vectors else [each for each in given if each.dim() >= 2]
    groups = {"params": others, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]


def optimizer_by_name(name: str, parameters: ParamsT, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer; 8-bit ones keep their state in CPU memory. ``options``: arguments of its class, as ``lr``.
    Raise ValueError if there is no such optimizer, or it does not take these options."""
    if name not in _OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown: expected one of {', '.join(_OPTIMIZERS)}")
    try:
        return _OPTIMIZERS[name](parameters, **options)
    except TypeError as error:
        raise ValueError(f"optimizer {name} does not take these options: {error}") from None
