"""FP8 weights on GPUs: one byte per weight, multiplied as 8-bit floats by inputs that are rounded to FP8, too.

The floats are e4m3: four significant bits, and 448 as the largest number. Codes are kept as plain bytes, because older
versions of torch can neither concatenate nor pad this dtype on GPUs.
"""

from __future__ import annotations

import functools
import logging

import torch

from swarm_models.kernels.int8_linear import TINY
from swarm_models.kernels.quantized_linear import QuantizedWeight

_PER_TOP = 1 / 448
_SIDE = 16  # the product takes matrices whose inputs and outputs are multiples of this
# Some of torch's kernels read the scales of a whole tile of rows or channels, past the end of the tensor
# (https://github.com/pytorch/pytorch/issues/133334).
_TILE = 256
_NEEDED = (8, 9)  # compute capability of NVIDIA's first GPUs with such products
_TRIED = ((1, 70, 300), (80, 64, 128))  # rows, out and in
_TOLERANCE = 1e-2  # for sums that are rounded to bfloat16

_logger = logging.getLogger(__name__)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 per row: ``x ≈ q * scale[:, None]``, rounded to the nearest.

    x: [rows, width], any float dtype -> q: [rows, width] uint8, the codes, and scale: [rows] fp32, on its device. A row
    with NaN or infinity gets a scale that is not finite, and changes no other row.
    """
    absmax = torch.maximum(x.amax(1), x.amin(1).neg_()).float()
    scale = (absmax * _PER_TOP).clamp_(min=TINY)
    return (x / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), scale


class Fp8Weight(QuantizedWeight):
    """A weight of FP8 codes with an fp32 scale per output row; each row of an input gets a scale of its own.

    GPUs sum the products in fp32, and round the sums to bfloat16. On a CPU, both matrices are expanded to fp32, because
    only newer versions of torch have this product there.
    """

    in_float32 = False

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        """Take the result of ``quantize_fp8``: q: [out, in] and scale: [out], on the device where they stay."""
        self.shape = q.shape
        self._q = _padded(q, 2).view(torch.float8_e4m3fn)
        self._scale = _with_slack(_padded(scale, 1))
        self.size_bytes = self._q.nbytes + self._scale.nbytes

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [rows, in] of any float dtype -> [rows, out] of the same dtype."""
        q, scale = quantize_fp8(x)
        if not x.is_cuda:
            inputs = q.view(torch.float8_e4m3fn).float().mul_(scale[:, None])
            return (inputs @ self.dequantize().T).bfloat16().to(x.dtype)
        product = torch._scaled_mm(
            _padded(q, 1).view(torch.float8_e4m3fn),
            self._q.T,
            scale_a=_with_slack(scale)[:, None],
            scale_b=self._scale[None],
            out_dtype=torch.bfloat16,
        )
        if product.shape[1] > self.shape[0]:
            product = product[:, : self.shape[0]].clone()  # a view could not be changed in place where gradients flow
        return product.to(x.dtype)

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return grad @ self.expanded(grad.dtype)

    def dequantize(self) -> torch.Tensor:
        return self.expanded(torch.float32)

    def expanded(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight that the products use: [out, in] of this dtype, a new tensor."""
        num_channels, width = self.shape
        weight = self._q[:num_channels, :width].to(dtype)  # exact
        return weight.mul_(self._scale[:num_channels, None])  # in fp32, rounded once


class Fp8WithExactInputs(QuantizedWeight):
    """An FP8 weight that multiplies inputs as they are, without rounding them to FP8.

    Rounding to FP8 turns a difference in the last bit into one of up to 12 %. Without it, two ways of computing the
    same outputs differ by the rounding of their dtype alone, so that a comparison finds mistakes.
    """

    in_float32 = False

    def __init__(self, weight: Fp8Weight) -> None:
        self.shape, self.size_bytes = weight.shape, weight.size_bytes
        self._weight = weight

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [rows, in] of any float dtype -> [rows, out] of the same dtype."""
        return x @ self._weight.expanded(x.dtype).T

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return self._weight.matmul_grad(grad)

    def dequantize(self) -> torch.Tensor:
        return self._weight.dequantize()


def _with_slack(scale: torch.Tensor) -> torch.Tensor:
    """Return a copy of the scales, [n], behind which there is memory up to a multiple of ``_TILE`` scales."""
    return torch.nn.functional.pad(scale, (0, -len(scale) % _TILE))[: len(scale)]


def _padded(values: torch.Tensor, num_dims: int) -> torch.Tensor:
    """Return the values with zeros at the ends of the last dimensions, up to multiples of ``_SIDE``."""
    padding = [end for size in values.shape[::-1][:num_dims] for end in (0, -size % _SIDE)]
    return torch.nn.functional.pad(values, padding) if any(padding) else values.contiguous()


@functools.cache
def has_fp8_products(device: torch.device) -> bool:
    """Return whether the device multiplies FP8: NVIDIA's GPUs from compute capability 8.9 on, if torch can use them.

    A few products are tried on such a GPU. If they fail or are wrong, a log line says so, and the result is False.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        if torch.cuda.get_device_capability(device) < _NEEDED:
            return False
        if all(_is_right(*shape, device) for shape in _TRIED):
            return True
        refusal = "they give something else"
    except Exception as error:  # any error of a driver, or of a torch without this product
        refusal = f"{type(error).__name__}: {error}"
    _logger.warning("products in FP8 cannot be used on %s: %s", device, refusal)
    return False


def _is_right(num_rows: int, num_channels: int, width: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, width, generator=generator).to(device) for rows in (num_channels, num_rows))
    product = Fp8Weight(*quantize_fp8(weight)).matmul(x).cpu()
    ours, theirs = (Fp8Weight(*quantize_fp8(values.cpu())).dequantize() for values in (x, weight))
    expected = ours @ theirs.T
    return bool((product - expected).abs().max() <= _TOLERANCE * expected.abs().max())
