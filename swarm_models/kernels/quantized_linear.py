"""A frozen linear layer over a weight that is stored in few bits, in any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.autograd.function import once_differentiable


def joined(tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate the quantisation results of a weight's tiles of rows into the result for the whole weight."""
    first, second = zip(*tiles, strict=True)
    return torch.cat(first), torch.cat(second)


class QuantizedWeight(ABC):
    """One frozen weight [out, in] in a format of few bits.

    Attributes:
        shape, size_bytes: the weight's shape, and the memory that it takes.
        in_float32: inputs must be fp32; otherwise products have the input's float dtype.
    """

    shape: torch.Size
    size_bytes: int
    in_float32 = True

    @abstractmethod
    def __init__(self, q: torch.Tensor, scales: torch.Tensor) -> None:
        """Take the result of quantising a weight: integers, [out, in], and their scales."""

    @classmethod
    def from_tiles(cls, shape: Sequence[int], tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Self:
        """Create a weight of this shape from the results for its tiles, each of whole 64-row strips."""
        return cls(*joined(tiles))

    @abstractmethod
    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [rows, in] fp32 -> x @ weight.T: [rows, out] fp32. A non-finite row affects no other row."""

    @abstractmethod
    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Map grad: [rows, out] fp32 -> gradient of ``matmul`` with respect to x, ``grad @ weight``: [rows, in]."""

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """Return the weight that the products use: [out, in] fp32, a new tensor."""


class FrozenProduct(torch.autograd.Function):
    """The product ``x @ weight.T``, differentiable in x alone: the weight is frozen, so no tensor needs to be saved.

    ``weight`` needs ``matmul`` and ``matmul_grad`` alone, as those of ``QuantizedWeight``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        product: torch.Tensor = weight.matmul(x)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.weight.matmul_grad(grad), None


class QuantizedLinear(torch.nn.Module):
    """A frozen linear layer over a ``QuantizedWeight``: [..., in] of any float dtype -> [..., out] of that dtype."""

    bias: torch.nn.Parameter | None
    is_quantised = True

    def __init__(self, quantized: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        """Create the layer; bias: [out], copied."""
        super().__init__()
        self.out_features, self.in_features = quantized.shape
        self.quantized = quantized
        if bias is not None:
            bias = torch.nn.Parameter(bias.detach().to(torch.float32, copy=True), requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> torch.Tensor:
        """Return the dequantised weight, [out, in] fp32, newly made at each access: for model code that reads it."""
        return self.quantized.dequantize()

    def swap_weight(self, quantized: QuantizedWeight) -> QuantizedWeight:
        """Multiply by this weight from now on, and return the weight before."""
        before, self.quantized = self.quantized, quantized
        return before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        rows = rows.float() if self.quantized.in_float32 else rows
        multiply: Callable[[torch.Tensor, QuantizedWeight], torch.Tensor] = FrozenProduct.apply
        y = multiply(rows, self.quantized) if rows.requires_grad else self.quantized.matmul(rows)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        weight = type(self.quantized).__name__
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {weight}"


@contextmanager
def swapped_weights(
    layers: Iterable[QuantizedLinear], other: Callable[[QuantizedWeight], QuantizedWeight]
) -> Iterator[None]:
    """Make each layer multiply by ``other(its weight)`` while the context is active."""
    before: list[tuple[QuantizedLinear, QuantizedWeight]] = []
    try:
        for layer in layers:
            before.append((layer, layer.swap_weight(other(layer.quantized))))
        yield
    finally:
        for layer, weight in reversed(before):
            layer.swap_weight(weight)
