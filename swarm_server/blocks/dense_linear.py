"""Unquantised linear layers on CPU, multiplied by oneDNN.

PyTorch multiplies fp32 matrices with MKL, which takes up to 1.5 times as long for few rows on an AMD EPYC. Weights stay
as they are.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from swarm_models.kernels.quantized_linear import FrozenProduct

KINDS = ("Linear", "FalconLinear")  # classes that multiply with their weight, [out, in], and add their bias


def use_onednn_(block: nn.Module) -> None:
    """Make the block's frozen fp32 layers on CPU multiply with oneDNN, if this torch can."""
    if not is_available():
        return
    module: Any
    for module in block.modules():
        if type(module).__name__ in KINDS and module.weight.dtype == torch.float32:
            module.forward = partial(_forward, module)  # not a class: adapters know linear layers by theirs


@functools.cache
def is_available() -> bool:
    """Return whether this torch multiplies with oneDNN, and does so correctly."""
    # The answer is kept, so it must not follow the default dtype or device of the first caller.
    on_cpu = partial(torch.tensor, dtype=torch.float32, device="cpu")
    try:
        found = _multiply(on_cpu([[1, 0], [0, 1]]), on_cpu([[1, 2], [3, 4]]), on_cpu([1, 1]))
    except (AttributeError, NotImplementedError, RuntimeError):  # torch's compiler owns it: it may change or go
        return False
    return torch.equal(found, on_cpu([[2, 4], [3, 5]]))


def _forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32 or x.device.type != "cpu" or linear.weight.requires_grad:
        return functional.linear(x, linear.weight, linear.bias)
    rows = x.reshape(-1, linear.in_features)  # with more dimensions the operator gives an unchangeable view
    product = FrozenProduct.apply(rows, _DenseWeight(linear.weight, linear.bias))
    return product.view(*x.shape[:-1], linear.out_features)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias. x: [rows, in], weight: [out, in] of any strides, bias: [out]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _DenseWeight(NamedTuple):
    """A frozen weight, [out, in], with the bias that is added to its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(x, self.weight, self.bias)

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return _multiply(grad, self.weight.T)
