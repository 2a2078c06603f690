"""Optimizers with 8-bit state in CPU memory, for models that leave little other memory free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from swarm_training.optim.dynamic_quantization import dequantize, quantize
from swarm_training.optim.rules import Moments, StateInPlace, UpdateRule, adamw_update, lamb_update

MIN_QUANTIZED = 4096  # elements: smaller parameters, such as norms, keep float32 moments


class Offloaded8bit(StateInPlace):
    """A LAMB or AdamW optimizer whose moments take a byte per element, in CPU memory (Dettmers et al., 2022).

    Parameters are updated one after the other on the CPU, whatever their device. Float32 moments therefore exist for
    one parameter at a time, and peers with and without GPUs get the same bits.
    """

    _rule: UpdateRule

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        weights = parameter.detach().to("cpu", torch.float32)  # the parameter itself, if it is that already
        gradient = parameter.grad.detach().to("cpu", torch.float32)  # type: ignore[union-attr]
        moments = _load(state, weights)
        self._rule(weights, gradient, moments, group)
        if weights.data_ptr() != parameter.data_ptr():
            parameter.copy_(weights)
        _store(state, moments)


class LAMB8bit(Offloaded8bit):
    """An ``Offloaded8bit`` with LAMB. Peers compare class names, so that different rules are noticed."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **options)
        self._rule = lamb_update


class AdamW8bit(Offloaded8bit):
    """An ``Offloaded8bit`` with AdamW; see ``LAMB8bit``."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, **options)
        self._rule = adamw_update


def _load(state: dict[str, Tensor], weights: Tensor) -> Moments:
    if not state:
        return Moments(torch.zeros_like(weights), torch.zeros_like(weights), 0)
    if "exp_avg" in state:
        return Moments(state["exp_avg"], state["exp_avg_sq"], int(state["step"]))
    mean = dequantize(state["mean_codes"], state["mean_maxima"], signed=True)
    square = dequantize(state["square_codes"], state["square_maxima"], signed=False)
    return Moments(mean, square, int(state["step"]))


def _store(state: dict[str, Tensor], moments: Moments) -> None:
    state["step"] = torch.tensor(moments.step)
    if moments.mean.numel() < MIN_QUANTIZED:
        state["exp_avg"], state["exp_avg_sq"] = moments.mean, moments.square
    else:
        state["mean_codes"], state["mean_maxima"] = quantize(moments.mean, signed=True)
        state["square_codes"], state["square_maxima"] = quantize(moments.square, signed=False)
