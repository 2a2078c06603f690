"""An int8 linear layer on GPUs: one byte per weight; activations, products and gradients keep the input's dtype.

The weights are rounded as on the CPU, so that both kinds of servers compute the same model. LLM.int8() rounds
activations, too, and in every product it waits for the GPU to find the outlier columns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.quantized_linear import QuantizedWeight

_FEW_ROWS = 64
_TRIED = ((1, 70, 300), (17, 4100, 256), (_FEW_ROWS, 70, 128))  # rows, out and in: each compiles to a separate kernel
_TOLERANCE = 1e-2  # for sums that are rounded to bfloat16
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_logger = logging.getLogger(__name__)


class GpuInt8Weight(QuantizedWeight):
    """A weight that multiplies few rows with an int8 kernel if there is one, and more rows with an expanded copy."""

    in_float32 = False

    def __init__(
        self, q: torch.Tensor, scale: torch.Tensor, few_rows: Product | None = None, most: int = _FEW_ROWS
    ) -> None:
        """Take the result of ``quantize_rows``.

        Args:
            q: [out, in] int8, on the device where it stays. scale: [out] fp32, on the same device.
            few_rows: a function like ``few_rows_product``, for up to ``most`` rows.
        """
        self.shape = q.shape
        self.size_bytes = q.nbytes + scale.nbytes
        self._q, self._scale = q.contiguous(), scale
        self._few_rows, self._most = few_rows, most

    def part(self, rows: slice, device: torch.device, dtype: torch.dtype) -> GpuInt8Weight:
        """Return a weight with these rows alone, copied to ``device``, for inputs of ``dtype``."""
        few_rows = None if self._few_rows is None else few_rows_kernel(device, dtype)
        q, scale = (each[rows].to(device, copy=True) for each in (self._q, self._scale))
        return GpuInt8Weight(q, scale, few_rows, self._most)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [rows, in] of any float dtype -> [rows, out] of the same dtype."""
        if self._few_rows is not None and 0 < len(x) <= self._most:
            return self._few_rows(x, self._q, self._scale)
        return x @ self._expanded(x.dtype).T

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self._expanded(grad.dtype)

    def dequantize(self) -> torch.Tensor:
        return self._expanded(torch.float32)

    def _expanded(self, dtype: torch.dtype) -> torch.Tensor:
        weight = torch.empty(self.shape, dtype=dtype, device=self._q.device)
        return torch.mul(self._q, self._scale[:, None], out=weight)  # in fp32, rounded once


@functools.cache
def few_rows_kernel(device: torch.device, dtype: torch.dtype) -> Product | None:
    """Return the kernel for few rows on ``device``; None, with a log line, if it fails there or gives wrong results."""
    try:
        from swarm_models.gpu.triton_int8 import few_rows_product

        def multiply(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            with torch.cuda.device(device):
                return few_rows_product(x, q, scale)

        if all(_is_right(multiply, *shape, device, dtype) for shape in _TRIED):
            return multiply
        refusal = "it gives something else"
    except Exception as error:  # any error of a driver or compiler: another implementation exists
        refusal = f"{type(error).__name__}: {error}"
    _logger.warning("no int8 kernel on %s, so that few rows take as long as many: %s", device, refusal)
    return None


def _is_right(
    multiply: Product, num_rows: int, num_channels: int, width: int, device: torch.device, dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, scale = quantize_rows(torch.randn(num_channels, width, generator=generator))
    x = torch.randn(num_rows, width, generator=generator).to(dtype)
    product, expected = multiply(x.to(device), q.to(device), scale.to(device)).cpu(), x.float() @ (q * scale[:, None]).T
    return bool((product - expected).abs().max() <= _TOLERANCE * expected.abs().max())
