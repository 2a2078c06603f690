"""The moving average of a model's weights, which is kept in the state of its optimizer.

It travels with that state: into checkpoints, to joiners, and back with a rollback. The update uses only elementwise
operations that IEEE 754 rounds correctly, so that all peers have the same bits whatever their machines.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

AVERAGE = "weights_average"  # a key of a parameter's state in the optimizer


@torch.no_grad()
def update_averages(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], decay: float) -> None:
    """Move the average of each parameter towards the parameter: a ← a + (1 − decay) (w − a), in float32 at least. The
    first call copies the parameters, as ``torch.optim.swa_utils.AveragedModel`` does.

    Call this after a step of the optimizer: many create their state only where a parameter has none.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        if AVERAGE in state:
            state[AVERAGE] += (wide - state[AVERAGE]) * (1 - decay)
        else:
            state[AVERAGE] = wide.clone()


def forget_averages(optimizer: torch.optim.Optimizer) -> None:
    """Remove the averages of an earlier run, whose checkpoint was loaded, if this run keeps none."""
    for parameter, state in list(optimizer.state.items()):
        state.pop(AVERAGE, None)
        if not state:
            del optimizer.state[parameter]


def average_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor | None:
    """Return the average of a parameter; None before the first step, or if there is no average."""
    average: Tensor | None = optimizer.state.get(parameter, {}).get(AVERAGE)
    return average


def averaged_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor] | None:
    """Return ``model.state_dict()`` with averages in place of the parameters that have one; None if none has."""
    averages = {
        parameter.data_ptr(): average
        for parameter in model.parameters()
        if (average := average_of(optimizer, parameter)) is not None and parameter.numel()
    }
    if not averages:
        return None
    return {name: averages.get(tensor.data_ptr(), tensor) for name, tensor in model.state_dict().items()}
