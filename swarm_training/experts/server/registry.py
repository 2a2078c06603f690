"""The kinds of experts, by name: feed-forward layers, and kinds that users register."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Factory = Callable[[int], nn.Module]
_INNER = 4  # times the hidden size


def feedforward(hidden: int) -> nn.Module:
    """Return a layer as in a transformer: a norm, and two linear layers with GELU between them, four times as wide."""
    inner = _INNER * hidden
    return nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))


_FACTORIES: dict[str, Factory] = {"feedforward": feedforward, "linear": lambda hidden: nn.Linear(hidden, hidden)}


def register_expert(kind: str, factory: Factory) -> None:
    """Register a kind of expert for servers of this process.

    ``factory`` takes the hidden size, and returns a module that maps [rows, hidden] to [rows, hidden]. Rows must be
    independent, because servers batch rows of several clients: no batch normalisation, no mixing of positions.

    Raises:
        ValueError: the name is taken.
    """
    if kind in _FACTORIES:
        raise ValueError(f"experts of kind {kind!r} are known already: expected another name")
    _FACTORIES[kind] = factory


def build(kind: str, hidden: int) -> nn.Module:
    """Build a module. Raise ValueError if the kind is unknown, or its modules do not map rows to rows."""
    if kind not in _FACTORIES:
        raise ValueError(f"experts of kind {kind!r} are not known: expected one of {', '.join(sorted(_FACTORIES))}")
    module = _FACTORIES[kind](hidden)
    with torch.no_grad():
        outputs = module(torch.zeros(2, hidden))
    if not isinstance(outputs, torch.Tensor) or outputs.shape != (2, hidden) or outputs.dtype != torch.float32:
        raise ValueError(f"experts of kind {kind!r} do not map float32 rows of {hidden} to such rows")
    return module
