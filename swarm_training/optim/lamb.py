"""LAMB, an optimizer for batches so large that Adam's steps no longer suit every layer (You et al., 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm_training.optim.rules import Moments, StateInPlace, lamb_update


class LAMB(StateInPlace):
    """An optimizer with Adam's direction and decoupled weight decay, whose step length is lr times a parameter's norm.

    Moments are float32 on the parameter's device. The same gradients lead to the same bits on every machine. Biases and
    norms usually belong into a parameter group with ``weight_decay=0``.
    """

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0, dtype=torch.int64)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        moments = Moments(state["exp_avg"], state["exp_avg_sq"], int(state["step"]))
        weights = parameter.float()  # the parameter itself, if it is float32
        lamb_update(weights, parameter.grad.float(), moments, group)  # type: ignore[union-attr]
        if weights is not parameter:
            parameter.copy_(weights)
        state["step"] += 1
