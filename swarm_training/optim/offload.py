"""Optimizers with 8-bit state in CPU memory, for models that leave little other memory free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from swarm_training.optim.dynamic_quantization import dequantize, quantize
from swarm_training.optim.rules import Moments, StateInPlace, UpdateRule, adamw_update, hyperparameters, lamb_update

_RULES: dict[str, UpdateRule] = {"lamb": lamb_update, "adamw": adamw_update}
MIN_QUANTIZED = 4096  # elements: smaller parameters, such as norms, keep float32 moments


class Offloaded8bit(StateInPlace):
    """A LAMB or AdamW optimizer whose moments take a byte per element, in CPU memory (Dettmers et al., 2022).

    Parameters are updated one after the other on the CPU, whatever their device. Float32 moments therefore exist for
    one parameter at a time, and peers with and without GPUs get the same bits.
    """

    def __init__(
        self,
        params: ParamsT,
        rule: str = "lamb",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_weight_norm: float | None = None,
    ) -> None:
        """Set the rule, "lamb" or "adamw", and the defaults; ``max_weight_norm`` is for LAMB.

        Raises:
            ValueError: the rule is unknown, or a value is out of range.
        """
        if rule not in _RULES:
            raise ValueError(f"rule {rule!r} is unknown: expected one of {', '.join(_RULES)}")
        self._rule = _RULES[rule]
        super().__init__(params, hyperparameters(lr, betas, eps, weight_decay, max_weight_norm))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all tensors of the state."""
        tensors = [value for state in self.state.values() for value in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

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
        super().__init__(params, "lamb", **options)


class AdamW8bit(Offloaded8bit):
    """An ``Offloaded8bit`` with AdamW; see ``LAMB8bit``."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, "adamw", **options)


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
