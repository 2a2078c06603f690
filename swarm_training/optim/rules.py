"""The rules that update one parameter in place: LAMB and AdamW.

The rules use only elementwise operations that IEEE 754 rounds correctly, and norms that are exact in any order. Peers
with the same parameter, gradient and moments therefore stay bit-identical, whatever their machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from swarm_training.numerics.reproducible import norm, power


@dataclass
class Moments:
    """The float32 moments of one parameter: running means of its gradient and of the square, after ``step`` steps."""

    mean: Tensor
    square: Tensor
    step: int

    def add(self, gradient: Tensor, beta1: float, beta2: float) -> None:
        self.step += 1
        self.mean *= beta1
        self.mean += gradient * (1 - beta1)
        self.square *= beta2
        self.square += gradient.square() * (1 - beta2)


UpdateRule = Callable[[Tensor, Tensor, Moments, Mapping[str, Any]], None]


def lamb_update(parameter: Tensor, gradient: Tensor, moments: Moments, group: Mapping[str, Any]) -> None:
    """Apply LAMB (You et al., 2020, Algorithm 2): r = m̂ / (√v̂ + ε) + λ w;  w ← w − lr φ(|w|) / |r| r.

    φ(z) = min(z, max_weight_norm), or z if that is None. The ratio is 1 if either norm is 0. All tensors are float32.
    """
    update = _adam_direction(gradient, moments, group)
    if group["weight_decay"]:
        update += parameter * group["weight_decay"]
    weight_norm, update_norm = norm(parameter), norm(update)
    if group["max_weight_norm"] is not None:
        weight_norm = min(weight_norm, group["max_weight_norm"])
    trust_ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
    parameter -= update * (group["lr"] * trust_ratio)


def adamw_update(parameter: Tensor, gradient: Tensor, moments: Moments, group: Mapping[str, Any]) -> None:
    """Apply AdamW (Loshchilov and Hutter, 2019, Algorithm 2): w ← w − lr λ w − lr m̂ / (√v̂ + ε), all float32."""
    update = _adam_direction(gradient, moments, group)
    if group["weight_decay"]:
        parameter *= 1 - group["lr"] * group["weight_decay"]
    parameter -= update * group["lr"]


def _adam_direction(gradient: Tensor, moments: Moments, group: Mapping[str, Any]) -> Tensor:
    """Add the gradient to the moments, and return m̂ / (√v̂ + ε) in the gradient's shape."""
    beta1, beta2 = group["betas"]
    moments.add(gradient, beta1, beta2)
    root = (moments.square / (1 - power(beta2, moments.step))).sqrt_()
    root += group["eps"]
    return (moments.mean / (1 - power(beta1, moments.step))).div_(root)


class StateInPlace(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other.

    Its state keeps its dtypes and devices when it is loaded; torch would take the parameter's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_weight_norm: float | None = None,
    ) -> None:
        """Set the defaults. max_weight_norm: the most that a parameter's norm counts in LAMB; 10 in the authors' code.
        Raise ValueError if a value is out of range."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} {value} is out of range: expected a finite number that is not negative")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} are out of range: expected two numbers from 0 to below 1")
        if max_weight_norm is not None and not max_weight_norm > 0:
            raise ValueError(f"max_weight_norm {max_weight_norm} is out of range: expected a positive number or None")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "max_weight_norm": max_weight_norm})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update the parameter by its gradient, with the hyperparameters of its group."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if index in state_dict["state"]:
                state = state_dict["state"][index]
                self.state[parameter] = {name: value.clone() for name, value in state.items()}
