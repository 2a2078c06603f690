"""The optimizers that a run file can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from swarm_training.optim.lamb import LAMB
from swarm_training.optim.offload import AdamW8bit, LAMB8bit

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "lamb": LAMB,
    "lamb8bit": LAMB8bit,
    "adamw8bit": AdamW8bit,
}


def optimizer_by_name(name: str, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer; 8-bit ones keep their state in CPU memory. ``options``: arguments of its class, as ``lr``.

    Raises:
        ValueError: there is no such optimizer, or it does not take these options.
    """
    if name not in _OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown: expected one of {', '.join(_OPTIMIZERS)}")
    try:
        return _OPTIMIZERS[name](parameters, **options)
    except TypeError as error:
        raise ValueError(f"optimizer {name} does not take these options: {error}") from None
